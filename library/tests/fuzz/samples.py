"""Sound files of every kind that the library reads, as small as they can be, and how each is read and used.

What is read is used and written back where that is cheap: a wrong type that fails only then is as bad.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import blockcache as bc
from blockcache.cli.arguments import PolicySource
from blockcache.cli.schedules import schedule_picture
from blockcache.engines.accelerate import check_fit
from blockcache.engines.build import build
from blockcache.engines.onnx import export
from blockcache.errors import NonFiniteError
from blockcache.models.dpt.public import read_checkpoint
from blockcache.models.loading import load_policy, save_policy
from blockcache.observations.tensors import check_observation
from blockcache.samplers import DDPM, ChosenSampler, DPMSolver, Fitted, SamplerConfig, table
from blockcache.schedule import compile_plan
from blockcache.solvers.recording import Recording
from blockcache_runtime import open_export
from blockcache_runtime.session import with_hash
from file_formats import EXAMPLES
from public_policy import DDIM, config, write_checkpoint

from . import sample_results as made
from .frames import FRAMES
from .running import Sample, sample_of
from .sample_policy import (
    ACTION,
    OBS,
    SEEN,
    STEPS,
    again,
    camera_policy,
    frames,
    observations,
    policy,
    port,
    recording,
    schedule,
)

# -- what is solved and sampled


def make_schedule(place: Path) -> list[Path]:
    schedule().save(place / "schedule.json")
    return [place / "schedule.json"]


def use_schedule(path: Path) -> None:
    found = bc.Schedule.load(path)
    schedule_picture(found)
    compile_plan(found).describe()
    found.save(again(path))
    assert bc.Schedule.load(again(path)) == found
    check_fit(found.fingerprint, port(), "shape")


def make_sampler(place: Path) -> list[Path]:
    DDPM(num_inference_steps=4).save(place / "ddpm.json")
    DPMSolver(timesteps=[70, 20.5, 3]).save(place / "dpmsolver.json")
    fitted = Fitted.of(DDPM(num_inference_steps=2))
    ChosenSampler(fitted, port().fingerprint, {"loss": [0.5, 0.25]}).save(place / "fitted.json")
    return [place / "ddpm.json", place / "dpmsolver.json", place / "fitted.json"]


def use_sampler(path: Path) -> None:
    found = SamplerConfig.load(path)
    assert table(found).steps == found.num_inference_steps
    chosen = ChosenSampler.load(path)
    chosen.save(again(path))
    assert ChosenSampler.load(again(path)) == chosen
    chosen.check_fit(port().fingerprint)


def make_recording(place: Path) -> list[Path]:
    recording().save(place / "recording.safetensors")
    return [place / "recording.safetensors"]


def use_recording(path: Path) -> None:
    found = Recording.load(path)
    found.save(again(path))
    solved = bc.solve(Recording.load(again(path)), updates=2, union=1)
    solved.save(again(path))


# -- policies


def make_policy(place: Path) -> list[Path]:
    save_policy(policy(), place / "policy")
    save_policy(camera_policy(), place / "cameras")
    return [place / "policy/config.json", place / "policy/model.safetensors", place / "cameras/config.json"]


def use_policy(path: Path) -> None:
    found = load_policy(path.parent)
    inputs = {name: torch.zeros(1, *shape) for name, shape in found.config.inputs.items()}
    seen = inputs if found.config.cameras else inputs["obs"]
    action = found.predict_action(seen, generator=torch.Generator().manual_seed(0))["action"]
    assert bool(torch.isfinite(action).all()), "actions that are not finite"
    save_policy(found, path.parent.with_name("again"))


@functools.cache
def _told() -> list[str]:
    """What Python tells of that no reader of data does, from now on in this process."""
    told: list[str] = []
    never = re.compile(
        r"(pickle|marshal|subprocess|socket|ctypes|shutil)\.|os\.(system|exec|fork|spawn|posix_spawn)|exec"
    )

    def tell(event: str, words: tuple[Any, ...]) -> None:
        if _reading and never.match(event):
            told.append(f"{event} {str(words)[:100]}")

    sys.addaudithook(tell)
    return told


_reading: list[Path] = []


def make_checkpoint(place: Path) -> list[Path]:
    sizes = {"n_layer": 1, "n_head": 1, "n_emb": 4, "horizon": 3, "n_obs_steps": SEEN, "n_action_steps": 2}
    sizes |= {"obs_dim": OBS, "action_dim": ACTION}
    write_checkpoint(place / "ddpm.ckpt", config(steps=STEPS, **sizes))
    write_checkpoint(
        place / "ddim.ckpt", config(DDIM, STEPS, resolved=True, obs_as_cond=False, time_as_cond=False, **sizes)
    )
    for name in ("ddpm.ckpt", "ddim.ckpt"):
        read_checkpoint(place / name)  # imports what it needs
    for fixed in ("cp437", "raw-unicode-escape"):  # zipfile's, for names that are not ASCII, and pickletools'
        codecs.lookup(fixed)  # Python imports a codec at its first use
    return [place / "ddpm.ckpt", place / "ddim.ckpt"]


def use_checkpoint(path: Path) -> None:
    told, before = _told(), {*os.listdir(path.parent)}
    _reading.append(path)
    try:
        found = read_checkpoint(path)
    finally:
        _reading.clear()
        assert not told, f"code was run: {told.pop()}"
        assert {*os.listdir(path.parent)} == before, "a file was written"
    seen = torch.zeros(1, found.n_obs_steps, found.obs_dim)
    with contextlib.suppress(NonFiniteError):
        action = found.predict_action(seen, generator=torch.Generator().manual_seed(0))["action"]
        assert bool(torch.isfinite(action).all()), "actions that are not finite"


def make_observations(place: Path) -> list[Path]:
    make_policy(place)
    np.savez(place / "observations.npz", obs=observations())
    return [place / "observations.npz"]


@functools.cache
def _source(place: Path) -> PolicySource:
    return PolicySource(str(place / "policy"))


def use_observations(path: Path) -> None:
    found = _source(path.parent).observations(str(path))
    assert np.isfinite(found).all(), "observations that are not finite"
    check_observation(found, SEEN, OBS, policy().model.pos_emb)


# -- exports


def make_export(place: Path) -> list[Path]:
    """One with a schedule, unrolled; one in full, as the loop that more steps would be."""
    bc.export_policy(policy(), schedule(), place / "scheduled.onnx")
    everything = {block.name: range(STEPS) for block in port().adapter.blocks}
    export(
        build(port(), bc.Schedule(STEPS, everything), "onnx"), port().fingerprint, place / "full.onnx", unrolled=False
    )
    for path in (place / "scheduled.onnx", place / "full.onnx"):
        np.save(path.with_suffix(".npy"), _actions(path))
    return [place / "scheduled.onnx", place / "full.onnx"]


def use_export(path: Path) -> None:
    expected = np.load(path.with_suffix(".npy"))
    found = _actions(path)
    if not np.array_equal(expected, found):
        raise AssertionError("other actions than those of the file that was written")


def _actions(path: Path, seed: int | None = None) -> np.ndarray[Any, Any]:
    """With noise of just the size that the undamaged file takes, unless a seed is given."""
    found, seen = open_export(path, threads=1), observations()[:2]
    noise = np.random.default_rng(0).standard_normal((STEPS, 2, 3, ACTION)).astype(np.float32)
    return found.predict_action(seen, **{"noise": noise} if seed is None else {"seed": seed})["action"]


def make_camera_export(place: Path) -> list[Path]:
    """One with an encoder, without its hash. As its trunk is narrow, most of the file is the graph and not its weights."""
    bc.export_policy(camera_policy(width=2), None, place / "cameras.onnx")
    data = (place / "cameras.onnx").read_bytes()
    (place / "cameras.onnx").write_bytes(data[: -len(with_hash(b""))])
    return [place / "cameras.onnx"]


def use_camera_export(path: Path) -> None:
    again(path).write_bytes(with_hash(path.read_bytes()))
    found = open_export(again(path), threads=1).predict_action(frames(), seed=0)["action"]
    assert np.isfinite(found).all(), "actions that are not finite"


def make_forged(place: Path) -> list[Path]:
    """Exports without their hash, which is put on after they were damaged: as somebody does it who means harm."""
    paths = make_export(place)
    for path in paths:
        path.write_bytes(path.read_bytes()[: -len(with_hash(b""))])
    return paths


def use_forged(path: Path) -> None:
    """Its actions are its own; it may neither crash nor hang, nor hand out what is not finite."""
    again(path).write_bytes(with_hash(path.read_bytes()))
    assert np.isfinite(_actions(again(path), seed=0)).all(), "actions that are not finite"


SAMPLES = {
    "schedule": Sample(make_schedule, use_schedule),
    "sampler": Sample(make_sampler, use_sampler),
    "recording": Sample(make_recording, use_recording),
    "policy": Sample(make_policy, use_policy),
    "checkpoint": Sample(make_checkpoint, use_checkpoint),
    "observations": Sample(make_observations, use_observations),
    "results": Sample(made.make_results, made.use_results),
    "jobs": Sample(made.make_jobs, made.use_jobs),
    "export": Sample(make_export, use_export),
    "forged-export": Sample(make_forged, use_forged),
    "camera-export": Sample(make_camera_export, use_camera_export),
    **FRAMES,
    **{
        name: sample_of(EXAMPLES, name)
        for name in (
            "check",
            "DiT config",
            "DiT weights",
            "LeRobot config",
            "LeRobot weights",
            "LeRobot processor",
            "LeRobot statistics",
            "tuning",
            "tuning state",
            "timings",
            "reference",
            "parity",
            "loss model",
            "stored result",
            "benchmark",
            "rdt state dict",
        )
    },
}
