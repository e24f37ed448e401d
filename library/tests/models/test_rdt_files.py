"""RDT's files: policy directories, and weights of the public code in the three forms in which they come."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

import blockcache as bc
from blockcache.errors import FileError, PolicyError
from blockcache.models.rdt.policy import RDTConfig, RDTPolicy, public_sampler
from blockcache.models.rdt.runner import convert_weights, read_weights
from rdt_policies import SMALL, rdt_config, rdt_observation, rdt_policy

UNSEEN = {"n_action_steps": 3, "lang_len": 5, "sampler": public_sampler(6)}  # what weights do not tell


def act(policy, batch=2):
    return policy.predict_action(rdt_observation(batch), generator=torch.Generator().manual_seed(0))["action_pred"]


def state(policy):
    return policy.denoiser.state_dict()


def test_a_directory_is_the_policy(tmp_path):
    policy = rdt_policy(norm="rms")
    bc.save_policy(policy, tmp_path / "rdt")
    loaded = bc.load_policy(tmp_path / "rdt")
    assert isinstance(loaded, RDTPolicy)
    assert loaded.config == policy.config
    assert torch.equal(act(loaded), act(policy))
    names = load_file(tmp_path / "rdt" / "model.safetensors").keys()
    public = {
        "model.x_pos_embed",
        "model.blocks.3.cross_attn.kv.weight",
        "state_adaptor.4.bias",
        "img_adaptor.0.weight",
    }
    assert public <= names
    assert json.loads((tmp_path / "rdt" / "config.json").read_text())["family"] == "rdt"


def test_the_default_config_is_the_public_one():
    config = RDTConfig()
    assert (config.depth, config.hidden_size, config.num_heads, config.horizon) == (28, 2048, 32, 64)
    assert (config.sampler.num_inference_steps, config.sampler.prediction_type) == (5, "sample")
    assert RDTConfig.from_dict(config.to_dict()) == config


def write(kind, tensors, directory):
    if kind == "safetensors":
        path = directory / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    else:
        path = directory / {"bin": "pytorch_model.bin", "deepspeed": "mp_rank_00_model_states.pt"}[kind]
        extra = {"optimizer": None, "global_steps": 7, "dp_world_size": 1, "ds_config": {"a": [1, 2]}}
        torch.save(tensors if kind == "bin" else {"module": tensors, **extra}, path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "bin", "deepspeed"])
def test_weights_of_the_public_code_load_as_they_are(kind, tmp_path):
    policy = rdt_policy(img_adaptor="linear")
    path = write(kind, state(policy), tmp_path)
    found = convert_weights(path, tmp_path / "made", **UNSEEN)
    assert found.config == policy.config
    assert torch.equal(act(found), act(policy))
    assert torch.equal(act(bc.load_policy(tmp_path / "made")), act(policy))


def test_half_precision_weights_become_float32(tmp_path):
    half = {name: tensor.to(torch.bfloat16) for name, tensor in state(rdt_policy()).items()}
    found = read_weights(write("deepspeed", half, tmp_path), **UNSEEN)
    assert {tensor.dtype for tensor in found.parameters()} == {torch.float32}
    assert torch.equal(state(found)["model.x_pos_embed"], half["model.x_pos_embed"].float())


class Evil:
    def __reduce__(self):
        return print, ("this must not be run",)


def test_nothing_of_a_file_is_run(tmp_path, capsys):
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": state(rdt_policy()), "optimizer": Evil()}, path)
    read_weights(path, **UNSEEN)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(FileError):
        read_weights(tmp_path / "plain.pt")
    assert "must not" not in capsys.readouterr().out


def without(name):
    return {key: value for key, value in state(rdt_policy()).items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda: without("model.blocks.2.norm3.weight"), r"missing model\.blocks\.2\.norm3\.weight"),
        (lambda: {**state(rdt_policy()), "model.odd": torch.ones(2)}, r"unknown model\.odd"),
        (
            lambda: {**state(rdt_policy()), "model.blocks.1.ffn.fc1.bias": torch.ones(3)},
            r"model\.blocks\.1\.ffn\.fc1\.bias has shape \(3,\), expected \(32,\)",
        ),
        (lambda: without("model.x_pos_embed"), r"expected model\.x_pos_embed with 3 axes, got no such tensor"),
        (lambda: {**state(rdt_policy()), "lang_adaptor.0.bias": torch.full((32,), torch.nan)}, "hold NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(tensors, message, tmp_path):
    with pytest.raises(PolicyError, match=message):
        read_weights(write("safetensors", tensors(), tmp_path), **UNSEEN)


def test_missing_and_extra_tensors_of_a_directory_are_listed(tmp_path):
    bc.save_policy(rdt_policy(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.blocks.0.norm1.weight"]
    save_file({**tensors, "normalizer.scale": torch.ones(1)}, tmp_path / "model.safetensors")
    message = r"missing model\.blocks\.0\.norm1\.weight; unknown normalizer\.scale"
    with pytest.raises(PolicyError, match=message):
        bc.load_policy(tmp_path)


def test_a_file_without_tensors_says_what_it_holds(tmp_path):
    torch.save({"epoch": 3, "loss": 0.5}, tmp_path / "odd.pt")
    with pytest.raises(FileError, match="expected tensors by name, or those under 'module', got epoch, loss"):
        read_weights(tmp_path / "odd.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "it needs 1 or more and 1,000 at most under 'depth', got 0"),
        ({"num_heads": 5}, "hidden_size must be 2 or more for each head"),
        ({"lang_len": 9}, "lang_len is 9, expected 8 at most"),
        ({"n_action_steps": 7}, "behind the horizon 6"),
        ({"norm": "layer"}, "norm must be one of std, rms"),
        ({"state_adaptor": "mlp0x_gelu"}, "an adaptor must be 'linear' or 'mlpNx_gelu'"),
        ({"img_adaptor": 3}, "it needs a text under 'img_adaptor', got 3"),
        ({"sampler": "dpm"}, "sampler must be a sampler's config"),
        ({"family": "dp-t"}, "this reads policies of family 'rdt'"),
        ({"task": 7}, "the policy's settings do not fit"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(PolicyError, match=message):
        rdt_config(**changes)


def test_a_config_far_larger_than_its_weights_is_refused_at_once(tmp_path):
    bc.save_policy(rdt_policy(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 65536}))
    with pytest.raises(PolicyError, match=r"the weights do not fit the policy's config: .* tensors of"):
        bc.load_policy(tmp_path)


def test_the_verb_converts_weights(blockcache, tmp_path):
    path = write("deepspeed", state(rdt_policy()), tmp_path)
    out = blockcache("policy", "convert", path, tmp_path / "made")
    assert "RDT, 4 layers x 32, 4 heads, horizon 6, 5 dpmsolver++ steps" in out
    assert "norm in config.json" in out
    assert bc.load_policy(tmp_path / "made").config.horizon == SMALL["horizon"]
