"""Checkpoints of the public Diffusion Policy code: the same actions, settings from the config, and every refusal."""

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

import blockcache as bc
import public_policy as public
from blockcache import cache as kept
from blockcache.errors import BlockcacheError, FileError, PolicyError
from blockcache.models.dpt import public as reader
from blockcache.models.dpt.public import convert_checkpoint, load_checkpoint, read_checkpoint
from blockcache.models.loading import load_policy
from blockcache.samplers import DDIM, DDPM
from public_policy import config, write_checkpoint

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")

SAMPLERS = {
    "ddpm": {"steps": 100},
    "ddpm, sample": {"scheduler": {**public.DDPM, "prediction_type": "sample", "clip_sample": False}, "steps": 10},
    "ddpm, fixed_large": {"scheduler": {**public.DDPM, "variance_type": "fixed_large"}, "steps": 20},
    "ddpm, as many steps as in training": {"scheduler": {**public.DDPM, "num_train_timesteps": 12}, "steps": None},
    "ddim": {"scheduler": public.DDIM, "steps": 8},
    "ddim, eta": {"scheduler": {**public.DDIM, "set_alpha_to_one": False}, "steps": 16, "eta": 0.5},
    "dpmsolver++": {"scheduler": public.SOLVER, "steps": 10},
    "dpmsolver++, first order": {"scheduler": {**public.SOLVER, "solver_order": 1}, "steps": 20},
    "sde-dpmsolver++": {"scheduler": {**public.SOLVER, "algorithm_type": "sde-dpmsolver++"}, "steps": 8},
}
WIDE = {"n_emb": 256, "n_layer": 2}
SHAPES = {
    "T = 16, width 256": WIDE,
    "T = 10, width 256": {**WIDE, "horizon": 10},
    "width 768, 4 observations": {"n_emb": 768, "n_layer": 1, "n_obs_steps": 4, "obs_dim": 60, "action_dim": 9},
    "T = 5, one action": {"horizon": 5, "n_obs_steps": 3, "n_action_steps": 1, "obs_dim": 16},
    "conditions encoded by layers": {"n_cond_layers": 2},
    "not causal, 8 heads": {"causal_attn": False, "n_head": 8},
    "in-painted": {"obs_as_cond": False},
    "in-painted, encoder only": {"obs_as_cond": False, "time_as_cond": False},
}


def gap(reference, policy, seed=0):
    """The largest difference between the chunks of both, from the same noise."""
    obs = torch.randn(2, reference.n_obs_steps, reference.obs_dim, generator=torch.Generator().manual_seed(seed))
    expected, found = (
        one.predict_action(obs, generator=torch.Generator().manual_seed(seed)) for one in (reference, policy)
    )
    assert expected["action_pred"].std() > 0.1
    for name, value in expected.items():
        assert found[name].shape == value.shape
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("settings", SAMPLERS.values(), ids=SAMPLERS)
def test_actions_are_the_same_with_every_sampler(settings):
    reference = write_checkpoint("a.ckpt", config(**settings))
    convert_checkpoint("a.ckpt", "policy")
    assert gap(reference, bc.load_policy("policy")) < 1e-5


@pytest.mark.parametrize("settings", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("resolved", [False, True], ids=["interpolations", "resolved"])
def test_actions_are_the_same_in_every_shape(settings, resolved):
    made = config(steps=100 if settings is WIDE else 5, resolved=resolved, **settings)
    assert gap(write_checkpoint("a.ckpt", made), read_checkpoint("a.ckpt")) < 1e-5


@pytest.mark.parametrize("sizes", [(1, 1), (4, 1), (20, 2)], ids=["identity", "a part", "whole"])
def test_a_shorter_normaliser_is_applied_over_and_over(sizes):
    assert gap(write_checkpoint("a.ckpt", config(steps=5), normalised=sizes), read_checkpoint("a.ckpt")) < 1e-5


def test_every_engine_runs_what_was_converted():
    reference = write_checkpoint("a.ckpt", config(steps=10))
    policy = bc.load_policy("a.ckpt")
    for engine in ("patched", "loop", "onnx"):
        with bc.accelerate(policy, engine=engine) as fast:
            assert gap(reference, fast) < 1e-5


def test_settings_come_from_the_config():
    """Those that no tensor tells."""
    write_checkpoint("a.ckpt", config(n_head=8, scheduler={**public.DDIM, "clip_sample": False}, steps=8))
    found = read_checkpoint("a.ckpt").config
    assert (found.n_head, found.sampler) == (8, DDIM(num_inference_steps=8, clip_sample=False))
    assert (found.task, found.weights) == ("pusht", "ema")
    assert found.training["task"] == "pusht_lowdim"
    assert found.training["converted_from"] == "a.ckpt"
    write_checkpoint("a.ckpt", config(name="can_lowdim"))
    assert read_checkpoint("a.ckpt").config.task is None


def test_what_the_config_leaves_out_is_as_in_the_public_code():
    made = config()
    for name in ("n_layer", "n_cond_layers", "time_as_cond", "p_drop_attn"):
        del made["policy"]["model"][name]
    for name in ("variance_type", "clip_sample", "prediction_type"):
        del made["policy"]["noise_scheduler"][name]
    full = config(n_layer=12)
    write_checkpoint("a.ckpt", full, change=lambda saved: {**saved, "cfg": made})
    found = read_checkpoint("a.ckpt").config
    assert (found.n_layer, found.p_drop_attn, found.sampler) == (12, 0.1, DDPM())


@pytest.mark.parametrize("ema", [True, False])
def test_the_weights_are_those_that_the_config_wants(ema):
    made = config(steps=5)
    made["training"]["use_ema"] = ema
    reference = write_checkpoint("a.ckpt", made)
    assert (gap(reference, read_checkpoint("a.ckpt")) < 1e-5) is ema
    reference = write_checkpoint("a.ckpt", made, ema=False)
    if ema:
        with pytest.raises(PolicyError, match=r"averaged weights .* has no ema_model \(it holds model, optimizer\)"):
            read_checkpoint("a.ckpt")
    else:
        assert gap(reference, read_checkpoint("a.ckpt")) < 1e-5


@pytest.mark.parametrize("kind", [dict, OrderedDict], ids=["copied", "as the modules give them"])
def test_state_dicts_may_be_ordered_and_half_precision(kind):
    def change(saved):
        state = saved["state_dicts"]["ema_model"]
        saved["state_dicts"]["ema_model"] = kind({name: tensor.half() for name, tensor in state.items()})

    reference = write_checkpoint("a.ckpt", config(steps=5), change)
    assert gap(reference.half().float(), read_checkpoint("a.ckpt")) < 1e-5


def test_torch_s_negative_bit_is_honoured_and_the_conjugate_bit_refused(monkeypatch):
    def negated(saved):
        state = saved["state_dicts"]["ema_model"]
        state |= {name: torch._neg_view(value.neg()) for name, value in state.items() if value.is_floating_point()}
        assert state["model.head.weight"].is_neg()

    reference = write_checkpoint("a.ckpt", config(steps=5), negated)
    assert gap(reference, load_checkpoint("a.ckpt")) < 1e-5
    monkeypatch.setattr(torch._utils, "get_tensor_metadata", lambda tensor: {"conj": True})
    write_checkpoint("b.ckpt", config(steps=5))
    with pytest.raises(FileError, match=r"stored as its conjugate; save it with \.resolve_conj\(\)"):
        load_checkpoint("b.ckpt")
    monkeypatch.setattr(torch._utils, "get_tensor_metadata", lambda tensor: {"else": 1})
    write_checkpoint("c.ckpt", config(steps=5))
    with pytest.raises(FileError, match="which is not known"):
        load_checkpoint("c.ckpt")


def test_a_tensor_may_be_a_view_of_others_numbers():
    """Transposed, and at an offset in a storage that it shares."""

    def change(saved):
        state = saved["state_dicts"]["ema_model"]
        together = torch.cat([state[f"model.{name}.weight"].flatten() for name in ("input_emb", "head")])
        count = state["model.input_emb.weight"].numel()
        state["model.input_emb.weight"] = together[:count].reshape(-1, 2)
        state["model.head.weight"] = together[count:].reshape(2, -1).T.contiguous().T
        state["model.ln_f.weight"] = torch.nn.Parameter(state["model.ln_f.weight"])

    reference = write_checkpoint("a.ckpt", config(steps=5), change)
    assert gap(reference, read_checkpoint("a.ckpt")) < 1e-5


# -- the cache and the command line


def test_a_checkpoint_is_converted_once(monkeypatch):
    reference = write_checkpoint("a.ckpt", config(steps=5))
    assert gap(reference, bc.load_policy("a.ckpt")) < 1e-5
    (made,) = Path("cache").glob("*.policy")
    monkeypatch.setattr("blockcache.models.dpt.public._converted", None)
    Path("b.ckpt").write_bytes(Path("a.ckpt").read_bytes())
    assert gap(reference, bc.load_policy("b.ckpt")) < 1e-5  # known by its content, not by its name
    assert [*Path("cache").glob("*.policy")] == [made]


def test_what_is_kept_is_made_again_if_it_is_damaged_or_by_other_code(monkeypatch):
    reference = write_checkpoint("a.ckpt", config(steps=5))
    load_checkpoint("a.ckpt")
    (made,) = Path("cache").glob("*.policy")
    (made / "model.safetensors").write_bytes(b"x")
    assert gap(reference, load_checkpoint("a.ckpt")) < 1e-5
    assert gap(reference, load_policy(made)) < 1e-5
    monkeypatch.setattr("blockcache.models.dpt.public.source_hash", lambda file: "older")
    load_checkpoint("a.ckpt")
    assert len([*Path("cache").glob("*.policy")]) == 2


@pytest.mark.parametrize("swap", [os.replace, lambda new, old: Path(old).write_bytes(Path(new).read_bytes())])
def test_a_file_that_is_exchanged_while_it_is_read_is_not_kept_as_the_other(swap, monkeypatch):
    reference, other = (write_checkpoint(f"{name}.ckpt", config(steps=5), seed=ord(name)) for name in "ab")
    whole, hashed = Path("a.ckpt").read_bytes(), reader._sha256

    def hashed_before_it_is_exchanged(*arguments):
        found = hashed(*arguments)
        if Path("b.ckpt").exists():
            swap("b.ckpt", "a.ckpt")
            Path("b.ckpt").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(reader, "_sha256", hashed_before_it_is_exchanged)
    if swap is os.replace:  # another file of that name: the one that was opened is read
        assert gap(reference, load_checkpoint("a.ckpt")) < 1e-5
    else:  # the same file with other bytes
        with pytest.raises(FileError, match=r"a\.ckpt was changed while it was read"):
            load_checkpoint("a.ckpt")
    assert gap(other, load_checkpoint("a.ckpt")) < 1e-5
    Path("a.ckpt").write_bytes(whole)
    assert gap(reference, load_checkpoint("a.ckpt")) < 1e-5


def test_a_flipped_bit_in_what_is_kept_is_noticed():
    write_checkpoint("a.ckpt", config(steps=5))
    expected = load_checkpoint("a.ckpt").state_dict()
    (made,) = Path("cache").glob("*.policy")
    for file in sorted(made.iterdir()):
        whole = file.read_bytes()
        for place in {0, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            found = load_checkpoint("a.ckpt")
            assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
            assert file.read_bytes() == whole  # it was made again


def test_exchanged_entries_are_noticed():
    references = {name: write_checkpoint(f"{name}.ckpt", config(steps=5), seed=ord(name)) for name in "ab"}
    for name in references:
        load_checkpoint(f"{name}.ckpt")
    first, second = Path("cache").glob("*.policy")
    for part in ("", "model.safetensors", "config.json"):  # the whole entry, and a file of it
        os.rename(first / part, "aside")
        os.rename(second / part, first / part)
        os.rename("aside", second / part)
        for name, reference in references.items():
            assert gap(reference, load_checkpoint(f"{name}.ckpt")) < 1e-5


def test_converted_policies_count_in_the_cache(monkeypatch):
    for name in "abc":
        write_checkpoint(f"{name}.ckpt", config(n_layer=1), seed=ord(name))
    load_checkpoint("a.ckpt")
    (first,) = Path("cache").glob("*.policy")
    os.utime(first, (1, 1))
    load_checkpoint("b.ckpt")
    (second,) = set(Path("cache").glob("*.policy")) - {first}
    os.utime(second, (2, 2))
    load_checkpoint("a.ckpt")  # of use since
    size = sum(file.stat().st_size for file in first.iterdir())
    monkeypatch.setattr(kept, "CACHE_BYTES", 2.5 * size)
    load_checkpoint("c.ckpt")
    assert first.exists()
    assert not second.exists()
    assert len([*Path("cache").glob("*.policy")]) == 2


def test_a_cache_that_cannot_be_written_costs_the_conversion_only(monkeypatch, caplog):
    reference = write_checkpoint("a.ckpt", config(steps=5))

    def full(policy, directory):
        raise FileError(f"cannot write {directory}: No space left on device")

    monkeypatch.setattr("blockcache.models.dpt.public.save", full)
    assert gap(reference, load_checkpoint("a.ckpt")) < 1e-5
    assert "cannot be kept for the next time" in caplog.text


def test_the_verb_writes_a_policy_directory(blockcache, refused):
    reference = write_checkpoint("epoch=0650-test_mean_score=1.000.ckpt", config(steps=5))
    said = blockcache("policy", "convert", "epoch=0650-test_mean_score=1.000.ckpt", "out/")
    assert said.startswith("out/: DP-T, 2 layers x 32, 4 heads, horizon 16, 5 ddpm steps, ema weights; 0.")
    assert sorted(path.name for path in Path("out").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads(Path("out/config.json").read_text())["n_head"] == 4
    assert gap(reference, bc.load_policy("out")) < 1e-5
    before = Path("out/model.safetensors").read_bytes()
    assert "out is there already" in refused("policy", "convert", "epoch=0650-test_mean_score=1.000.ckpt", "out")
    Path("empty").mkdir()
    assert "empty is there already" in refused("policy", "convert", "epoch=0650-test_mean_score=1.000.ckpt", "empty")
    assert Path("out/model.safetensors").read_bytes() == before
    assert "--steps is for a folder" in refused("policy", "convert", "a.ckpt", "other", "--steps", 5)


def test_every_verb_takes_the_file(blockcache, refused):
    write_checkpoint("a.ckpt", config(steps=5, n_layer=1))
    np.savez("observations.npz", obs=np.random.default_rng(0).random((2, 2, 20)))
    blockcache("calibrate", "a.ckpt", "--observations", "observations.npz", "--generations", 1)
    blockcache("solve", "recording.safetensors", "-S", 2)
    assert "MB" in blockcache("export", "a.ckpt", "schedule.json")
    assert bc.open_export("policy.onnx").predict_action(torch.zeros(1, 2, 20))["action"].shape == (1, 8, 2)
    assert "brings no observations" in refused("calibrate", "a.ckpt")
    assert "no checkpoint at nowhere.ckpt: the file does not exist" in refused("export", "nowhere.ckpt")
    assert "is U-Net" not in refused("export", "nowhere.ckpt")


# -- refused


def changed_config(**changes):
    return lambda: write_checkpoint("a.ckpt", config(), change=lambda saved: {**saved, "cfg": config(**changes)})


def with_config(path, value):
    """The config with another value in one place; an ellipsis takes it away."""

    def write():
        made = config()
        *way, last = path.split(".")
        holder = made
        for name in way:
            holder = holder[name]
        holder[last] = value
        if value is ...:
            del holder[last]
        write_checkpoint("a.ckpt", config(), change=lambda saved: {**saved, "cfg": made})

    return write


def with_state(change):
    def edit(saved):
        change(saved["state_dicts"]["ema_model"])

    return lambda: write_checkpoint("a.ckpt", config(), edit)


def saved(value):
    return lambda: torch.save(value, "a.ckpt")


def raw(data):
    return lambda: Path("a.ckpt").write_bytes(data)


def truncated():
    write_checkpoint("a.ckpt", config())
    data = Path("a.ckpt").read_bytes()
    Path("a.ckpt").write_bytes(data[: len(data) // 2])


UNET = "diffusion_policy.policy.diffusion_unet_lowdim_policy.DiffusionUnetLowdimPolicy"
NORMALIZER = "normalizer.params_dict.action.scale"
REFUSED = {
    "truncated": (truncated, "cannot be read .* it may be cut short, get it again"),
    "no zip": (raw(b"hello, world" * 9), "is no checkpoint of torch.save"),
    "empty": (raw(b""), "is empty"),
    "bare pickle": (raw(pickle.dumps({"cfg": {}})), "is a bare pickle"),
    "old torch": (lambda: torch.save({}, "a.ckpt", _use_new_zipfile_serialization=False), "of torch before 1.6"),
    "lightning": (saved({"state_dict": {}, "epoch": 3}), "expected cfg and state_dicts in it, got state_dict, epoch"),
    "no names": (saved([1, 2]), "expected cfg and state_dicts in it, got list"),
    "no config": (saved({"cfg": 3, "state_dicts": {}}), "expected a config with names, got int"),
    "U-Net": (
        with_config("policy._target_", UNET),
        "this is a U-Net .*DiffusionUnetLowdimPolicy.*; block-wise caching needs the transformer",
    ),
    "U-Net inside": (with_config("policy.model._target_", "a.b.ConditionalUnet1D"), "this is a U-Net"),
    "unknown": (
        with_config("policy._target_", "a.BETLowdimPolicy"),
        "does not know .policy is BETLowdimPolicy.*known are DiffusionTransformerLowdimPolicy",
    ),
    "unknown model": (with_config("policy.model._target_", "a.DiT"), "policy.model is DiT"),
    "unnamed": (with_config("policy._target_", ...), "does not know"),
    "no policy": (with_config("policy", 3), "the config names no policy"),
    "no use_ema": (with_config("training.use_ema", ...), "the config lacks training.use_ema"),
    "no heads": (with_config("policy.model.n_head", "four"), "it needs a whole number under 'n_head'"),
    "heads that do not divide": (with_config("policy.model.n_head", 5), "divisible by n_head, got 32 and 5"),
    "no horizon": (with_config("policy.horizon", ...), "the config lacks policy.horizon"),
    "two horizons": (with_config("policy.model.horizon", 10), "policy.model.horizon is 10, the rest .* needs 16"),
    "no number": (with_config("policy.model.n_emb", "${eval:'__import__(1)'}"), "Call is no part of a sum"),
    "depends on now": (with_config("policy.model.n_emb", "${now:%Y}"), r"depends on \$\{now:...\}"),
    "refers to itself": (with_config("horizon", "${policy.horizon}"), "more than 40 levels"),
    "steps only": (with_config("pred_action_steps_only", True), "pred_action_steps_only"),
    "unknown setting": (with_config("policy.model.rotary", True), "policy.model in the config has rotary"),
    "unknown step argument": (with_config("policy.guidance", 3.0), "policy in the config has guidance"),
    "unknown sampler": (
        with_config("policy.noise_scheduler._target_", "diffusers.PNDMScheduler"),
        "sampler PNDMScheduler; known are DDIMScheduler, DDPMScheduler",
    ),
    "learned variance": (with_config("policy.noise_scheduler.variance_type", "learned"), "sampler DDPMScheduler"),
    "thresholding": (with_config("policy.noise_scheduler.thresholding", True), "with thresholding = True"),
    "unknown sampler setting": (with_config("policy.noise_scheduler.speed", 3), "speed, which diffusers does not know"),
    "other layers": (with_config("policy.model.n_layer", 1), r"unknown model.decoder.layers.1\.\S+, .* and \d+ more"),
    "far more layers": (with_config("policy.model.n_layer", 900), "tensors of .* expected 900 layers"),
    "other width": (with_config("policy.model.n_emb", 64), r"has shape \(.*32.*\), expected \(.*64.*and \d+ more"),
    "missing": (with_state(lambda state: state.pop("model.head.bias")), "missing model.head.bias$"),
    "extra": (with_state(lambda state: state.update(x=torch.ones(3))), "unknown x$"),
    "no tensor": (with_state(lambda state: state.update(x=3)), "ema_model has x: expected a tensor, got int"),
    "whole numbers": (with_state(lambda state: state.update({"model.head.bias": torch.tensor([1, 2])})), "torch.int64"),
    "NaN": (with_state(lambda state: state["model.head.bias"].fill_(torch.nan)), "the weights hold NaN"),
    "no scale": (with_state(lambda state: state[NORMALIZER].zero_()), "the action normaliser's scale is 0"),
    "odd scale": (with_state(lambda state: state.update({NORMALIZER: torch.ones(3)})), r"has shape \(3,\), expected \(2,\)"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_leaves_nothing(write, sentence, refused):
    write()
    with pytest.raises(BlockcacheError, match=sentence) as caught:
        read_checkpoint("a.ckpt")
    assert "a.ckpt" in str(caught.value)
    line = refused("policy", "convert", "a.ckpt", "out")
    assert line == " ".join(str(caught.value).split())
    assert refused("export", "a.ckpt") == line
    assert {path.name for path in Path().iterdir()} <= {"a.ckpt", "cache"}
    assert not [*Path("cache").glob("*")]


# -- files that mean harm


class Reduced:
    """Something whose pickle is a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def touch(name):
    return f"import pathlib; pathlib.Path({name!r}).touch()"


HARM = {
    "system": lambda: Reduced(os.system, "touch ran"),
    "popen": lambda: Reduced(subprocess.Popen, ["touch", "ran"]),
    "open": lambda: Reduced(open, "ran", "w"),
    "exec": lambda: Reduced(exec, touch("ran")),
    "eval": lambda: Reduced(eval, "open('ran', 'w')"),
    "import": lambda: Reduced(__import__, "this"),
    "importlib": lambda: Reduced(__import__("importlib").import_module, "this"),
    "pickle in a pickle": lambda: Reduced(pickle.loads, pickle.dumps(Reduced(os.system, "touch ran"))),
}
PLACES = {
    "for the whole": lambda saved, harm: harm,
    "for the config": lambda saved, harm: {**saved, "cfg": harm},
    "beside all that is needed": lambda saved, harm: {**saved, "more": harm},
    "among the weights": lambda saved, harm: saved["state_dicts"]["ema_model"].update(x=harm),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("make", HARM.values(), ids=HARM)
def test_harm_is_refused_and_nothing_is_run(make, place, refused):
    write_checkpoint("a.ckpt", config(), change=lambda saved: place(saved, make()))
    sys.modules.pop("this", None)
    line = refused("policy", "convert", "a.ckpt", "out")
    assert "a.ckpt would run " in line
    assert "nothing of it was run" in line
    with pytest.raises(FileError, match="would run"):
        bc.load_policy("a.ckpt")
    assert {path.name for path in Path().iterdir()} <= {"a.ckpt", "cache"}
    assert "this" not in sys.modules


def test_pickled_bytes_are_never_opened():
    harm = pickle.dumps(Reduced(os.system, "touch ran"))
    write_checkpoint("a.ckpt", config(), change=lambda saved: saved["pickles"].update(epoch=harm))
    read_checkpoint("a.ckpt")
    assert not Path("ran").exists()


def deep(levels):
    """Lists within lists, as only a pickle written by hand has them."""
    return b"\x80\x02}X\x03\x00\x00\x00cfg" + b"]" * levels + b"a" * (levels - 1) + b"sX\x0b\x00\x00\x00state_dicts}s."


def archive(path, entries, **settings):
    """A zip file with these entries, a name or a ZipInfo and its bytes each."""
    with zipfile.ZipFile(path, "w", **settings) as file:
        for name, data in entries:
            file.writestr(name, data)


def test_a_deep_recursion_is_refused(refused):
    for levels in (30, 1_000, 400_000):
        archive("a.ckpt", [("archive/data.pkl", deep(levels))])
        expected = "expected a config with names" if levels == 30 else "more than 40 levels"
        assert expected in refused("policy", "convert", "a.ckpt", "out")
    archive("a.ckpt", [("archive/data.pkl", deep(600_000))])
    assert "more than 1,000,000 operations" in refused("policy", "convert", "a.ckpt", "out")
    assert not Path("out").exists()


def bomb():
    """256 MB of weights in one."""
    write_checkpoint("a.ckpt", config())
    with zipfile.ZipFile("a.ckpt") as file:
        entries = [(name, file.read(name)) for name in file.namelist()]
    archive("a.ckpt", [*entries, ("archive/data/999", bytes(2**28))], compression=zipfile.ZIP_DEFLATED)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(refused):
    bomb()
    assert Path("a.ckpt").stat().st_size < 2 * 2**20
    assert "is packed" in refused("policy", "convert", "a.ckpt", "out")
    assert not Path("out").exists()


def test_a_tensor_that_claims_more_than_is_there_is_refused():
    """Numbers that are used over and over would be a bomb too."""

    def change(state):
        state["model.head.weight"] = torch.ones(1).expand(2, 32)

    with_state(change)()
    with pytest.raises(FileError, match="reaches beyond the 1 numbers that are stored"):
        read_checkpoint("a.ckpt")


def test_reading_looks_at_nothing_but_the_file():
    """Every import, call or file that Python would tell of, from the moment that everything needed is loaded."""
    write_checkpoint("sound.ckpt", config(n_layer=1))
    for name, make in HARM.items():
        write_checkpoint(f"{name}.ckpt", config(n_layer=1), change=lambda saved, make=make: {**saved, "more": make()})
    code = """
import sys
from pathlib import Path
from blockcache.errors import BlockcacheError
from blockcache.models.dpt.public import read_checkpoint

read_checkpoint("sound.ckpt")
told, watching = [], []
quiet = ("compile", "object.__getattr__", "sys._getframe", "builtins.id")  # compile: a sum is taken apart, not run
sys.addaudithook(lambda event, words: told.append((event, str(words[0])[:80])) if watching and event not in quiet else None)
for path in sorted(Path().glob("*.ckpt")):
    watching.append(path)
    try:
        read_checkpoint(path)
    except BlockcacheError:
        pass
    watching.clear()
print([item for item in told if item[0] != "open" or not (item[1].isdecimal() or item[1].endswith(".ckpt"))])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n", found.stderr


def test_a_file_without_the_public_libraries():
    """None of them is imported, nor is pickle's own machine asked."""
    write_checkpoint("a.ckpt", config(n_layer=1))
    code = """
import pickle, sys
from blockcache.models.dpt.public import read_checkpoint
read_checkpoint("a.ckpt")  # some libraries need it while they are imported
pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = None
read_checkpoint("a.ckpt")
unwanted = ("diffusion_policy", "hydra", "dill", "omegaconf", "robomimic", "torchvision")
print([name for name in unwanted if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n", found.stderr


def test_what_torch_itself_writes_is_read_whatever_its_parts():
    """torch.save to a buffer names its folder otherwise."""
    buffer = io.BytesIO()
    with public.omegaconf_there() as modules:
        made = config(steps=5)
        reference = public.Policy(made)
        torch.save(public.payload(reference, made, modules), buffer)
    Path("b.ckpt").write_bytes(buffer.getvalue())
    assert gap(reference, read_checkpoint("b.ckpt")) < 1e-5
