"""The DP-T policy: names, files, noise and what it refuses."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

import blockcache as bc
from blockcache.errors import FileError, ObservationError, PolicyError, SamplerError, ScheduleError
from blockcache.models.checkpoint import load_tensors
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.models.policy_files import shipped_policies
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, DDPM, ChosenSampler
from blockcache.schedule import Schedule
from disk import full_disk


def public_names(layers):
    """FAMILIES.md's state-dict keys of a low-dimensional DP-T, less the dummies that take no part in an action."""
    names = {f"model.{name}" for name in ("pos_emb", "cond_pos_emb", "mask", "memory_mask")}
    for module in ("input_emb", "cond_obs_emb", "encoder.0", "encoder.2", "ln_f", "head"):
        names |= {f"model.{module}.{part}" for part in ("weight", "bias")}
    for layer in range(layers):
        prefix = f"model.decoder.layers.{layer}"
        for attention in ("self_attn", "multihead_attn"):
            parts = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
            names |= {f"{prefix}.{attention}.{part}" for part in parts}
        for module in ("linear1", "linear2", "norm1", "norm2", "norm3"):
            names |= {f"{prefix}.{module}.{part}" for part in ("weight", "bias")}
    for field in ("obs", "action"):
        statistics = [f"input_stats.{name}" for name in ("min", "max", "mean", "std")]
        names |= {f"normalizer.params_dict.{field}.{part}" for part in ("scale", "offset", *statistics)}
    return names


def test_parameter_names_are_the_public_ones(policy):
    assert set(policy.state_dict()) == public_names(2)


def test_masks(policy):
    """Causal over actions; action t sees condition s when t >= s - 1, the time being s = 0."""
    seen, memory = policy.model.mask == 0, policy.model.memory_mask == 0
    assert [[bool(seen[t, s]) for s in range(6)] for t in range(6)] == [[t >= s for s in range(6)] for t in range(6)]
    assert [[bool(memory[t, s]) for s in range(3)] for t in range(6)] == [
        [t >= s - 1 for s in range(3)] for t in range(6)
    ]
    for mask in (policy.model.mask, policy.model.memory_mask):
        assert set(mask.flatten().tolist()) == {0.0, float("-inf")}


def test_sinusoid(policy):
    d, t = 16, 37.0
    half = d // 2
    angles = [t * np.exp(-np.log(10000) / (half - 1) * i) for i in range(half)]
    expected = [*np.sin(angles), *np.cos(angles)]
    np.testing.assert_allclose(policy.model.time_emb(torch.tensor([t]))[0], expected, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- actions


def test_shapes_and_the_executed_slice(make_policy, observe, form):
    result = make_policy(**form).predict_action(observe(3))
    assert result["action_pred"].shape == (3, 6, 3)
    assert result["action"].shape == (3, 4, 3)
    assert torch.equal(result["action"], result["action_pred"][:, 1:5])
    assert torch.isfinite(result["action_pred"]).all()


def test_noise_equals_generator(make_policy, observe, run, form, sampler):
    policy, obs = make_policy(sampler=sampler, **form), observe(3)
    noise = policy.draw_noise(3, torch.Generator().manual_seed(7))
    assert torch.equal(policy.predict_action(obs, noise=noise)["action_pred"], run(policy, obs, seed=7))
    assert not torch.equal(run(policy, obs, seed=7), run(policy, obs, seed=8))


def test_how_much_noise_is_drawn(make_policy, samplers):
    draws = {
        "ddpm": 5,
        "ddim": 0,
        "ddim-eta": 6,
        "dpmsolver++": 0,
        "sde-dpmsolver++": 6,
        "ddpm-placed": 6,
        "euler": 0,
        "fitted": 5,
    }
    for name, sampler in samplers.items():
        assert make_policy(sampler=sampler).draw_noise(2).shape == (1 + draws[name], 2, 6, 3)


def test_each_noise_tensor_matters(policy, observe):
    """Nothing that is handed over is left unread."""
    obs, noise = observe(1), policy.draw_noise(1, torch.Generator().manual_seed(0))
    plain = policy.predict_action(obs, noise=noise)["action_pred"]
    for index in range(len(noise)):
        changed = noise.clone()
        changed[index] += 0.1
        assert not torch.equal(policy.predict_action(obs, noise=changed)["action_pred"], plain)


def test_without_a_generator_the_global_one_is_used(policy, observe, run):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        first = policy.predict_action(observe())["action_pred"]
        second = policy.predict_action(observe())["action_pred"]
    assert torch.equal(first, run(policy, observe(), seed=11))
    assert not torch.equal(first, second)


def test_a_generator_leaves_the_global_one_alone(policy, observe, run):
    before = torch.get_rng_state()
    run(policy, observe())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_is_its_samples(policy, observe):
    obs, noise = observe(3), policy.draw_noise(3, torch.Generator().manual_seed(0))
    together = policy.predict_action(obs, noise=noise)["action_pred"]
    for b in range(3):
        alone = policy.predict_action(obs[b : b + 1], noise=noise[:, b : b + 1])["action_pred"]
        torch.testing.assert_close(alone[0], together[b], rtol=1e-5, atol=1e-5)


def test_observations_as_tensor_array_or_mapping(policy, observe, run):
    obs = observe(2)
    expected = run(policy, obs)
    for same in (obs.numpy(), {"obs": obs}, {"obs": obs.numpy(), "other": 3}, obs.double(), obs.tolist()):
        assert torch.equal(run(policy, same), expected)


@pytest.mark.parametrize(
    ("obs", "sentence"),
    [
        (torch.zeros(2, 5), r"shape \(2, 5\), expected \(batch, 2, 5\)"),
        (torch.zeros(1, 3, 5), "expected"),
        (torch.zeros(1, 2, 4), "expected"),
        (torch.zeros(0, 2, 5), "expected"),
        (torch.zeros(1, 1, 2, 5), "expected"),
        ({"state": torch.zeros(1, 2, 5)}, r"no key 'obs', got \['state'\]"),
        ({}, "no key 'obs'"),
        ("obs", "not an array of numbers"),
        (None, "not an array of numbers"),
        ([["a"]], "not an array of numbers"),
        (torch.full((1, 2, 5), float("nan")), "NaN or infinity; check the sensor"),
        (np.full((1, 2, 5), np.inf), "NaN or infinity"),
        ({"obs": torch.full((1, 2, 5), -float("inf"))}, "NaN or infinity"),
    ],
)
def test_wrong_observations_are_refused(policy, obs, sentence):
    with pytest.raises(ObservationError, match=sentence):
        policy.predict_action(obs)


@pytest.mark.parametrize("shape", [(6, 2, 6, 3), (5, 1, 6, 3), (6, 1, 6, 4), (1, 6, 3)])
def test_wrong_noise_is_refused(policy, observe, shape):
    with pytest.raises(ObservationError, match=r"expected \(6, 1, 6, 3\).*policy.draw_noise makes it"):
        policy.predict_action(observe(), noise=torch.zeros(shape))


def test_inpainting_keeps_the_observation(make_policy, observe):
    """The encoder-only form denoises observations too; where they are known they come out as they went in."""
    policy = make_policy(time_as_cond=False, obs_as_cond=False)
    seen = []
    policy.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    obs = observe(2)
    policy.predict_action(obs)
    assert len(seen) == 6
    for sample in seen:
        assert torch.equal(sample[:, :2, 3:], policy.normalizer.obs.normalize(obs))


def test_with_sampler_shares_the_weights(policy, observe, run):
    other = policy.with_sampler(DDIM(num_inference_steps=3))
    assert other.model is policy.model
    assert other.num_inference_steps == 3
    assert not torch.equal(run(other, observe()), run(policy, observe()))


def test_with_sampler_does_not_touch_the_modules(policy):
    policy.training = True  # the policy's own flag; its modules are in eval mode
    other = policy.with_sampler(DDIM(num_inference_steps=3))
    assert other.training
    assert not any(module.training for module in policy.model.modules())


# --------------------------------------------------------------------------------------------------------------- files


def test_save_and_load(make_policy, observe, run, tmp_path, form):
    policy = make_policy(task="toy", training={"steps": 3}, **form)
    bc.save_policy(policy, tmp_path / "p")
    loaded = bc.load_policy(tmp_path / "p")
    assert loaded.config == policy.config
    assert not loaded.training
    for name, tensor in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(run(loaded, observe(2)), run(policy, observe(2)))
    assert sorted(os.listdir(tmp_path / "p")) == ["config.json", "model.safetensors"]


def test_the_config_says_what_it_is(policy, tmp_path):
    bc.save_policy(policy, tmp_path / "p")
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert (config["format"], config["version"]) == ("blockcache.policy", 1)
    assert config["made_by"].startswith("blockcache ")


def test_the_shipped_policy():
    policy = bc.load_policy("pusht")
    assert policy.config.task == "pusht"
    assert set(policy.state_dict()) == public_names(8)
    result = policy.with_sampler(DDIM(num_inference_steps=2)).predict_action(torch.zeros(1, 2, 20))
    assert torch.isfinite(result["action"]).all()


def test_a_directory_called_like_a_shipped_policy_counts_if_it_holds_one(policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pusht" / "state").mkdir(parents=True)  # as 'blockcache paper suite main pusht -o pusht' leaves it
    assert bc.load_policy("pusht").obs_dim == 20
    (tmp_path / "pusht" / "state").rmdir()
    bc.save_policy(policy, "pusht")
    assert bc.load_policy("pusht").obs_dim == policy.obs_dim


def test_an_unknown_policy():
    with pytest.raises(FileError, match=r"no policy 'pusht2': it is neither a directory nor .* \(.*pusht.*\)"):
        bc.load_policy("pusht2")


@pytest.fixture
def saved(policy, tmp_path):
    bc.save_policy(policy, tmp_path / "p")
    return tmp_path / "p"


def rewrite(directory, change):
    tensors = safetensors.torch.load((directory / "model.safetensors").read_bytes())
    change(tensors)
    (directory / "model.safetensors").write_bytes(safetensors.torch.save(tensors))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("model.head.bias"), "missing model.head.bias"),
        (lambda t: t.pop("normalizer.params_dict.obs.scale"), "missing normalizer.params_dict.obs.scale"),
        (lambda t: t.update({"model.tail": torch.zeros(1)}), "unknown model.tail"),
        (lambda t: t.update({"model.head.bias": torch.zeros(4)}), r"model.head.bias has shape \(4,\), expected \(3,\)"),
        (lambda t: t["model.head.bias"].fill_(float("nan")), "NaN or infinity in model.head.bias"),
        (lambda t: t["model.pos_emb"].fill_(float("inf")), "NaN or infinity in model.pos_emb"),
        (lambda t: t["model.mask"].fill_(float("nan")), "NaN or infinity in model.mask"),
        (lambda t: t["normalizer.params_dict.action.scale"].fill_(float("nan")), "NaN or infinity"),
    ],
)
def test_wrong_weights_are_refused(saved, change, sentence):
    rewrite(saved, change)
    with pytest.raises(PolicyError, match=sentence):
        bc.load_policy(saved)


def test_a_refused_tensor_changes_nothing(policy):
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    tensors = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    tensors["model.head.bias"] = torch.full((3,), float("nan"))
    with pytest.raises(PolicyError, match="NaN"):
        load_tensors(policy, tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_dummies_and_missing_statistics_of_public_checkpoints_are_fine(saved, policy, observe, run):
    def change(tensors):
        tensors["_dummy_variable"] = torch.zeros(0)
        tensors["mask_generator._dummy_variable"] = torch.zeros(0)
        for name in [name for name in tensors if ".input_stats." in name]:
            del tensors[name]

    rewrite(saved, change)
    assert torch.equal(run(bc.load_policy(saved), observe()), run(policy, observe()))


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("model.safetensors", b"", "is empty"),
        ("model.safetensors", b"PK\x03\x04 a pickle, perhaps", "cut short"),
        ("config.json", b"", "is empty"),
        ("config.json", b'{"obs_dim": 5', "not valid JSON"),
        ("config.json", b"[]", "expected an object"),
    ],
)
def test_broken_files_are_refused(saved, file, content, sentence):
    (saved / file).write_bytes(content)
    with pytest.raises(FileError, match=sentence):
        bc.load_policy(saved)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_truncated_and_missing_files_are_refused(saved, file):
    whole = (saved / file).read_bytes()
    (saved / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match="cut short"):
        bc.load_policy(saved)
    (saved / file).unlink()
    with pytest.raises(FileError, match="does not exist"):
        bc.load_policy(saved)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"colour": "red"}, PolicyError, "unknown policy settings colour"),
        ({"version": 2}, FileError, "format version 2"),
        ({"format": "blockcache.schedule"}, FileError, "is not a policy config"),
        ({"family": "rdt"}, PolicyError, "family"),
        ({"n_layer": 0}, PolicyError, "it needs 1 or more and 1,000 at most under 'n_layer', got 0"),
        ({"n_layer": "2"}, PolicyError, "it needs a whole number under 'n_layer', got '2'"),
        ({"horizon": 6.0}, PolicyError, "it needs a whole number under 'horizon', got 6.0"),
        ({"n_head": 3}, PolicyError, "divisible by n_head"),
        ({"n_emb": 2, "n_head": 1}, PolicyError, "n_emb must be even, 4 or more"),
        ({"n_cond_layers": -1}, PolicyError, "it needs 0 or more and 1,000 at most under 'n_cond_layers'"),
        ({"n_cond_layers": "1"}, PolicyError, "it needs a whole number under 'n_cond_layers'"),
        ({"causal_attn": "yes"}, PolicyError, "it needs true or false under 'causal_attn', got 'yes'"),
        ({"p_drop_attn": 1.5}, PolicyError, "it needs 0 or more and 0.999 at most under 'p_drop_attn', got 1.5"),
        ({"n_action_steps": 6}, PolicyError, "the executed slice ends at 7, behind the horizon 6"),
        ({"time_as_cond": False}, PolicyError, "obs_as_cond needs time_as_cond"),
        ({"sampler": {"type": "heun"}}, SamplerError, "sampler setting type"),
        ({"n_emb": 32}, PolicyError, "has shape"),
    ],
)
def test_other_configs_are_refused(saved, changes, error, sentence):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=sentence) as caught:
        bc.load_policy(saved)
    assert str(saved / ("model.safetensors" if "n_emb" in changes and len(changes) == 1 else "config.json")) in str(
        caught.value
    )


@pytest.mark.parametrize("key", ["obs_dim", "sampler"])
def test_an_incomplete_config_is_refused(saved, key):
    config = json.loads((saved / "config.json").read_text())
    del config[key]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyError, match=key):
        bc.load_policy(saved)


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_saving_again_replaces_the_policy(saved, make_policy, observe, run):
    other = make_policy(seed=5)
    bc.save_policy(other, saved)
    assert torch.equal(run(bc.load_policy(saved), observe()), run(other, observe()))
    assert os.listdir(saved.parent) == ["p"]


@pytest.mark.parametrize("function", ["fsync", "replace", "open"])
def test_a_full_disk_leaves_the_old_policy_whole(saved, make_policy, monkeypatch, function):
    before = contents(saved.parent)
    monkeypatch.setattr(os, function, full_disk)
    with pytest.raises(FileError, match=r"cannot write .*/p: No space left on device; nothing was changed"):
        bc.save_policy(make_policy(seed=5), saved)
    monkeypatch.undo()
    assert contents(saved.parent) == before
    assert os.listdir(saved.parent) == ["p"]


def test_other_peoples_files_are_never_replaced(policy, tmp_path, monkeypatch):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    (tmp_path / "notes.txt").write_text("more work")
    before = contents(tmp_path)
    with pytest.raises(FileError, match=r"holds chapter1\.tex besides a policy"):
        bc.save_policy(policy, tmp_path / "thesis")
    with pytest.raises(FileError, match="is a file, a policy is a directory"):
        bc.save_policy(policy, tmp_path / "notes.txt")
    with pytest.raises(FileError, match="cannot write"):
        bc.save_policy(policy, tmp_path / "notes.txt" / "p")
    monkeypatch.chdir(tmp_path / "thesis")
    with pytest.raises(FileError, match="besides a policy"):
        bc.save_policy(policy, ".")
    assert contents(tmp_path) == before


def test_an_empty_directory_is_filled(policy, tmp_path):
    (tmp_path / "p").mkdir()
    bc.save_policy(policy, tmp_path / "p")
    assert bc.load_policy(tmp_path / "p").config == policy.config


def test_a_symlinked_directory_is_followed(policy, saved, make_policy, observe, run):
    link = saved.parent / "latest"
    link.symlink_to(saved)
    other = make_policy(seed=5)
    bc.save_policy(other, link)
    assert link.is_symlink()
    assert torch.equal(run(bc.load_policy(saved), observe()), run(other, observe()))


def test_config_round_trip(policy):
    settings = json.loads(json.dumps(policy.config.to_dict()))
    assert DPTConfig.from_dict(settings) == policy.config
    assert DPTConfig.from_dict(replace(policy.config, task="x").to_dict()).task == "x"
    assert isinstance(DiffusionTransformerPolicy(DPTConfig.from_dict(settings)), torch.nn.Module)


def test_what_was_tuned_has_its_weights_from_the_policy_around_it(policy, tmp_path, run, observe):
    bc.save_policy(policy, tmp_path / "policy")
    few = policy.with_sampler(DDPM(num_inference_steps=3))
    bc.save_policy(few, tmp_path / "policy" / "tuned")
    (tmp_path / "policy/tuned/model.safetensors").unlink()
    assert torch.equal(run(bc.load_policy(tmp_path / "policy/tuned"), observe()), run(few, observe()))
    (tmp_path / "policy/config.json").unlink()  # no policy any more
    with pytest.raises(FileError, match=r"tuned/model\.safetensors"):
        bc.load_policy(tmp_path / "policy/tuned")


def test_what_was_tuned_for_other_weights_is_refused(policy, tmp_path):
    placed = policy.with_sampler(replace(policy.sampler, timesteps=(3, 1), num_inference_steps=2))
    bc.save_policy(policy, tmp_path / "policy")
    tuned = tmp_path / "policy" / "tuned"
    bc.save_policy(placed, tuned)
    (tuned / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"sampler\.json: it must say for which weights"):
        bc.load_policy(tuned)  # nothing says for which
    ChosenSampler(placed.sampler, port_of(policy).fingerprint).save(tuned / "sampler.json")
    assert bc.load_policy(tuned).sampler == placed.sampler
    trained = DiffusionTransformerPolicy.random(policy.config, seed=7)
    bc.save_policy(trained, tmp_path / "again")
    os.replace(tmp_path / "again/model.safetensors", tmp_path / "policy/model.safetensors")
    with pytest.raises(SamplerError, match=r"tuned/sampler\.json: this .* was chosen for another policy \(weights"):
        bc.load_policy(tuned)
    ChosenSampler(policy.sampler, port_of(trained).fingerprint).save(tuned / "sampler.json")
    with pytest.raises(PolicyError, match="it must say for which weights"):  # it vouches for another sampler
        bc.load_policy(tuned)


def test_a_schedule_beside_a_policy_is_that_of_its_own_directory(policy, tmp_path, monkeypatch):
    for name, updates in (("here", 2), ("there", 3)):
        place = tmp_path / name / "policy"
        bc.save_policy(policy, place)
        observations = [port_of(policy).synthetic_observations(1)["obs"]]
        recording = bc.calibrate(policy, observations, progress=False)
        bc.solve(recording, updates=updates).save(place / "schedule.json")
    monkeypatch.chdir(tmp_path / "here")
    loaded = bc.load_policy("policy")
    monkeypatch.chdir(tmp_path / "there")
    with bc.accelerate(loaded, engine="patched") as fast:
        assert fast.stats().notes == (f"the schedule is {tmp_path / 'here/policy/schedule.json'}",)
    unbound = json.loads((tmp_path / "here/policy/schedule.json").read_text())
    unbound["fingerprint"]["weights"] = None
    (tmp_path / "here/policy/schedule.json").write_text(json.dumps(unbound))
    with pytest.raises(
        ScheduleError, match="made for no weights in particular, and is not followed unless it is named"
    ):
        bc.accelerate(loaded, engine="patched")
    named = Schedule.load(tmp_path / "here/policy/schedule.json")
    with bc.accelerate(loaded, named, engine="patched") as fast:
        assert "no weights in particular" in fast.stats().notes[0]


def test_what_was_tuned_for_a_shipped_policy_goes_by_name():
    tuned = [name for name in shipped_policies() if name.endswith("/tuned")]
    assert "pusht/tuned" in tuned
    for name in tuned:
        found, whole = bc.load_policy(name), bc.load_policy(name.removesuffix("/tuned"))
        assert found.num_inference_steps < whole.num_inference_steps
        assert all(torch.equal(one, other) for one, other in zip(found.parameters(), whole.parameters(), strict=True))
