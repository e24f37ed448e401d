"""Every kind of file that the runtime and the library read: how a small one is written, and how it is read up to its use.

One list for all tests that try files: `EXAMPLES`; the laboratory's tests have their own in `laboratory_formats`.
`write(directory)` gives the path of the file that a test may change; `load(path)` reads it as far as anybody does, so
that nothing is left to fail later.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import blockcache as bc
from blockcache import Block, Fingerprint, Recording, Schedule
from blockcache.cli.arguments import PolicySource
from blockcache.compare.candidates import Candidate
from blockcache.compare.paired import Group, OpenLoop, Setting
from blockcache.compare.store import FORMAT as JOB
from blockcache.compare.store import Store
from blockcache.compare.tuner import STATE as TUNING_STATE
from blockcache.engines import export_policy
from blockcache.engines.build import read_tuned
from blockcache.files import write_arrays
from blockcache.measure.distance import Distances
from blockcache.measure.features import ActionFeatures
from blockcache.measure.statistics import Estimate
from blockcache.models.dit.lerobot import read_directory
from blockcache.models.loading import load_policy, save_policy
from blockcache.models.rdt.policy import RDTConfig, RDTPolicy
from blockcache.models.rdt.runner import read_weights
from blockcache.models.registry import port_of
from blockcache.results import bench
from blockcache.results.check import Check, Roughness
from blockcache.results.losses import LossModel
from blockcache.results.rollouts import ActionError, MethodRun, Record, Results
from blockcache.results.stored import Stored, StoredMethod
from blockcache.results.summary import summarise
from blockcache.results.timings import Timings
from blockcache.results.tuning import Goal, Point, Tuning
from blockcache.samplers import DDPM, SamplerConfig
from blockcache.samplers import table as sampler_table
from blockcache.solvers.recording import METRICS
from blockcache_runtime import open_export
from blockcache_runtime.parity import Parity, Reference
from public_policy import config, write_checkpoint

NAMES = ("layers.0.SA", "layers.0.FFN")
FINGERPRINT = Fingerprint("dp-t", NAMES, {"width": 16}, 5, {"type": "ddpm"}, "ab" * 32)
ERROR = ActionError(0.1, 0.2)
FEATURES = ActionFeatures(0.01, 0.02, 0.3, 0.05, 0.1, 0.08)
MACHINE = {"processor": "toy", "cores": 2, "torch": "2", "onnxruntime": "1", "diffusers": None, "load_average": [1.0]}
ROW = {
    "name": "eager",
    "engine": "eager",
    "threads": 1,
    "p50_ms": 2.0,
    "p95_ms": 2.5,
    "p99_ms": 3.0,
    "chunk_hz": 5.0,
    "action_hz": 40.0,
    "speedup": 1.0,
    "over_full": None,
    "gflop": 1.5,
    "gflops": 3.0,
    "of_peak": 0.1,
    "max_difference": 1e-6,
    "saving": None,
    "limit": True,
}
SHAPE = {"layers": 2, "width": 16, "horizon": 6, "steps": 6, "sampler": "ddpm"}
RUN = {
    "shape": SHAPE,
    "schedule": {"reused_share": 0.5},
    "machine": MACHINE,
    "peak_gflops": {"1": 50.0},
    "repeats": 3,
    "eager": "eager",
    "rows": [ROW, {**ROW, "name": "saving", "saving": "fold"}],
    "unavailable": {"x": "no"},
}


@dataclass(frozen=True)
class Example:
    """One kind of file. `formats` are the names of the `Format`s that it is read with, if any."""

    name: str
    write: Callable[[Path], Path]
    load: Callable[[Path], Any]
    formats: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1)
def policy() -> Any:
    from conftest import tiny_policy

    return tiny_policy(sampler=DDPM(num_inference_steps=4), task="toy", training={"steps": 3})


@functools.lru_cache(maxsize=1)
def setting() -> Setting:
    return Setting(port_of(policy()), np.zeros((2, 2, 5), dtype=np.float32))


def write_schedule(directory: Path) -> Path:
    path = directory / "schedule.json"
    Schedule(5, {NAMES[0]: [0, 2], NAMES[1]: [0, 3]}, FINGERPRINT, {"method": "bac", "deep": [{"a": 1.5}]}).save(path)
    return path


def write_recording(directory: Path) -> Path:
    rng, path = np.random.default_rng(0), directory / "recording.safetensors"
    Recording(
        blocks=(Block(NAMES[0], "SA", 0, 10), Block(NAMES[1], "FFN", 1, 20)),
        matrices={name: rng.normal(size=(2, 5, 5)) for name in METRICS},
        scores=rng.normal(size=2),
        input_change=rng.normal(size=(3, 4)),
        output_change=rng.normal(size=(3, 4)),
        generations=2,
        fingerprint=FINGERPRINT,
        origin={"seed": 0},
    ).save(path)
    return path


def write_sampler(directory: Path) -> Path:
    DDPM(timesteps=[80, 60.5, 2]).save(directory / "sampler.json")
    return directory / "sampler.json"


METHODS = ("full", "uniform:S=3")


def write_results(directory: Path, **setting: Any) -> Path:
    """`setting` is what stands in the file beside what every evaluation has."""
    reuse = {"updates": {name: [0, 2] for name in NAMES}}
    Results(
        task={"name": "toy", "success": "near", "max_steps": 9},
        policy={"source": "tiny", "fingerprint": FINGERPRINT.to_dict()},
        setting={
            "first_seed": 0,
            "rollouts": 2,
            "group": 2,
            "noise": "keyed",
            "open_loop_observations": 4,
            "calibration": {"generations": 4, "seed": 0, "observations": "ff"},
            **setting,
        },
        noise_floor=ERROR,
        methods=tuple(MethodRun(name, "loop", {"type": "ddpm"}, reuse, True, 10, 0.0, ERROR) for name in METHODS),
        records=tuple(Record(name, seed, 0.5, seed == 1, 9, None, 0.1, None) for name in METHODS for seed in (0, 1)),
    ).save(directory / "results.json")
    return directory / "results.json"


def load_results(path: Path) -> Any:
    return summarise(Results.load(path))


def write_timings(directory: Path) -> Path:
    timed = {"p50": 0.1, "p95": 0.2, "p99": 0.2, "seconds": [0.1, 0.2]}
    about = {"policy": FINGERPRINT.to_dict(), "machine": MACHINE, "setting": "seconds per chunk"}
    Timings.FORMAT.save(directory / "timings.json", {**about, "methods": {"full": timed, "x": timed}})
    return directory / "timings.json"


def load_timings(path: Path) -> Any:
    found = Timings.load(path)
    return [(found.ms(name), found.over(name, "full")) for name in found.seconds]


def write_check(directory: Path) -> Path:
    distances = Distances(**{item.name: Estimate(0.5, 0.4, 0.6, 9) for item in fields(Distances)})
    Check(
        policy={"source": "tiny", "fingerprint": FINGERPRINT.to_dict()},
        method={"name": "uniform:S=3", "engine": "loop", "shares_all_noise": True, "flops": 10, "full_flops": 40},
        setting={"observations": 9, "samples": 4, "features": 16, "actions": 8, "seams": 0, "seed": 0},
        error=ERROR,
        noise_floor=ERROR,
        distances=distances,
        floor=distances,
        roughness=Roughness(0.1, None),
        full_roughness=Roughness(0.1, 0.2),
        features=FEATURES,
    ).save(directory / "check.json")
    return directory / "check.json"


def load_check(path: Path) -> Any:
    check = Check.load(path)
    return check.verdict, check.clear


def write_tuning(directory: Path) -> Path:
    distances = Distances(**{item.name: Estimate(0.5, 0.4, 0.6, 9) for item in fields(Distances)})
    point = Point("ddpm-3", "onnx", 1, 1.0, 1.2, 10, 24, distances, 0.1, Estimate(-0.01, -0.03, 0.01, 20))
    Tuning(
        policy={"source": "tiny", "fingerprint": FINGERPRINT.to_dict()},
        goal=Goal(deadline_ms=3.0),
        setting={"seed": 0, "replan": 4},
        machine={"cores": 2},
        plain_ms=9.0,
        points=(point,),
        chosen=point,
        fresh=None,
        notes=("a note",),
    ).save(directory / "tuning.json")
    return directory / "tuning.json"


def load_tuning(path: Path) -> Any:
    """As evidence, and as a directory that is used."""
    tuning = Tuning.load(path)
    return tuning.met, tuning.front, read_tuned(path.parent, SimpleNamespace(horizon=16, executed=(1, 9)))


def write_loss_model(directory: Path) -> Path:
    ranges = {
        "executed actions of a chunk": (8, 8),
        "its actions' spread": (0.1, 0.2),
        "its actions' roughness": (0, 1),
    }
    weights = {"energy beyond spread": 0.5, "root of added roughness": 0.4}
    LossModel("three tasks", 36, ("dp-t",), ranges, weights, 1.5, {"dp-t": 3}).save(directory / "loss-model.json")
    return directory / "loss-model.json"


def load_loss_model(path: Path) -> Any:
    return LossModel.load(path).predict(FEATURES, "dp-t", 8)


def write_tuning_state(directory: Path) -> Path:
    content = {"policy": FINGERPRINT.to_dict(), "machine": "abacus, 2 cores", "observations": "0" * 64, "seed": 0}
    TUNING_STATE.save(directory / "tuning-state.json", content)
    return directory / "tuning-state.json"


def write_stored(directory: Path) -> Path:
    estimate = Estimate(0.5, 0.4, 0.6, 9)
    methods = (StoredMethod("full", 10, 1.5, estimate, None), StoredMethod("x", 5, None, estimate, estimate))
    Stored("toy", "ab" * 32, {"generations": 4, "seed": 0, "observations": "ff"}, methods).save(directory / "s.json")
    return directory / "s.json"


GROUP, OPEN_LOOP = Group(Candidate(), (4, 5)), OpenLoop(Candidate(), 0)


def write_rollouts_job(directory: Path) -> Path:
    records = [asdict(Record("", seed, 0.5, True, 9, None, 0.1, None)) for seed in GROUP.seeds]
    for record in records:
        del record["method"]
    Store(directory).put("ab" * 16, {"records": records, "seconds": 1.5})
    return directory / f"{'ab' * 16}.json"


def write_actions_job(directory: Path) -> Path:
    Store(directory).put("ab" * 16, {"actions": np.zeros((2, 4, 3)).tolist(), "reused": 0.5})
    return directory / f"{'ab' * 16}.json"


def load_job(job: Group | OpenLoop, path: Path) -> Any:
    return Store(path.parent).get("ab" * 16, functools.partial(job.check, setting()))


def write_bench(directory: Path) -> Path:
    rows = [{**row, "samples_ms": [1.0, 2.0]} for row in RUN["rows"]]
    bench.FORMAT.save(directory / "bench.json", {**RUN, "rows": rows})
    return directory / "bench.json"


def rdt() -> RDTPolicy:
    sizes = dict.fromkeys(("action_dim", "horizon", "n_action_steps", "img_cond_len", "max_lang_cond_len"), 2)
    return RDTPolicy.random(RDTConfig(**sizes, depth=1, hidden_size=4, num_heads=2, lang_token_dim=2, img_token_dim=2))


def write_rdt(file: str, directory: Path) -> Path:
    bc.save_policy(rdt(), directory / "rdt")
    return directory / "rdt" / file


def write_rdt_weights(directory: Path) -> Path:
    torch.save({"module": rdt().denoiser.state_dict(), "global_steps": 1}, directory / "states.pt")
    return directory / "states.pt"


def write_policy(file: str, directory: Path) -> Path:
    save_policy(policy(), directory / "policy")
    return directory / "policy" / file


def load_beside(path: Path) -> Any:
    return bc.load_policy(path.parent)


def load_named_policy(path: Path) -> Any:
    PolicySource(str(path.parent)).task("pusht")
    return load_policy(path.parent)


def write_public_checkpoint(directory: Path) -> Path:
    sizes = {"n_layer": 1, "n_head": 1, "n_emb": 4, "horizon": 3, "n_action_steps": 2}
    write_checkpoint(directory / "a.ckpt", config(steps=2, **sizes))
    return directory / "a.ckpt"


def write_dit(file: str, directory: Path) -> Path:
    from dit_policies import tiny_dit

    bc.save_policy(tiny_dit(), directory / "policy")
    return directory / "policy" / file


def write_lerobot(file: str, directory: Path) -> Path:
    from lerobot_directory import Reference

    return Reference().write(directory / "policy") / file


def load_lerobot(path: Path) -> Any:
    """As far as it goes without CLIP's encoders, which an extra brings."""
    return read_directory(path.parent)


def write_observations(directory: Path) -> Path:
    write_policy("", directory)
    write_arrays(directory / "obs.npz", obs=np.ones((4, 2, 5), np.float32))
    return directory / "obs.npz"


def load_observations(path: Path) -> Any:
    return PolicySource(str(path.parent / "policy")).observations(str(path))


def write_export(directory: Path) -> Path:
    export_policy(policy(), None, directory / "policy.onnx")
    return directory / "policy.onnx"


def write_reference(directory: Path) -> Path:
    inputs, noise = {"obs": np.zeros((2, 2, 5), np.float32)}, np.zeros((3, 2, 6, 2), np.float32)
    Reference("0" * 64, inputs, noise, np.zeros((2, 3, 2), np.float32), np.ones(2)).save(directory / "a.reference.npz")
    return directory / "a.reference.npz"


def write_parity(directory: Path) -> Path:
    Parity(2, 1e-6, 1e-7, 1e-3, 2.0, 2.5, same_export=True).save(directory / "parity.json")
    return directory / "parity.json"


EXAMPLES = [
    Example("schedule", write_schedule, Schedule.load, ("blockcache.schedule",)),
    Example("recording", write_recording, Recording.load, ("blockcache.recording",)),
    Example("sampler", write_sampler, lambda path: sampler_table(SamplerConfig.load(path)), ("blockcache.sampler",)),
    Example("results", write_results, load_results, ("blockcache.results",)),
    Example("timings", write_timings, load_timings, ("blockcache.timings",)),
    Example("stored result", write_stored, Stored.load, ("blockcache.stored",)),
    Example("check", write_check, load_check, ("blockcache.check",)),
    Example("tuning", write_tuning, load_tuning, ("blockcache.tuning",)),
    Example("loss model", write_loss_model, load_loss_model, ("blockcache.loss-model",)),
    Example("tuning state", write_tuning_state, TUNING_STATE.load, ("blockcache.tuning-state",)),
    Example("job of rollouts", write_rollouts_job, functools.partial(load_job, GROUP), (JOB.name,)),
    Example("job of actions", write_actions_job, functools.partial(load_job, OPEN_LOOP), (JOB.name,)),
    Example("benchmark", write_bench, bench.FORMAT.load, ("blockcache.bench",)),
    Example("policy config", functools.partial(write_policy, "config.json"), load_named_policy, ("blockcache.policy",)),
    Example("policy weights", functools.partial(write_policy, "model.safetensors"), load_named_policy),
    Example("rdt config", functools.partial(write_rdt, "config.json"), load_beside, ("blockcache.policy",)),
    Example("rdt weights", functools.partial(write_rdt, "model.safetensors"), load_beside),
    Example("rdt state dict", write_rdt_weights, read_weights),
    Example("checkpoint", write_public_checkpoint, bc.load_policy),
    Example("DiT config", functools.partial(write_dit, "config.json"), lambda path: bc.load_policy(path.parent)),
    Example("DiT weights", functools.partial(write_dit, "model.safetensors"), lambda path: bc.load_policy(path.parent)),
    Example("LeRobot config", functools.partial(write_lerobot, "config.json"), load_lerobot),
    Example("LeRobot weights", functools.partial(write_lerobot, "model.safetensors"), load_lerobot),
    Example(
        "LeRobot processor",
        functools.partial(write_lerobot, "policy_preprocessor.json"),
        load_lerobot,
        ("lerobot.processor",),
    ),
    Example(
        "LeRobot statistics",
        functools.partial(write_lerobot, "policy_postprocessor_step_4_unnormalizer_processor.safetensors"),
        load_lerobot,
    ),
    Example("observations", write_observations, load_observations),
    Example("reference", write_reference, Reference.load, ("blockcache.reference",)),
    Example("parity", write_parity, Parity.load, ("blockcache.parity",)),
    Example("export", write_export, lambda path: open_export(path, threads=1), ("blockcache.onnx",)),
]


def safetensors_with(data: bytes, change: Callable[[Any], Any]) -> bytes:
    """The same file with another header, and the header within that too."""
    length = int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8 : 8 + length]))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
