"""Sound files of every kind that the laboratory reads, for `fuzz`, as `fuzz.samples` has those of the library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from fuzz.running import Sample, sample_of
from fuzz.sample_policy import ACTION, OBS, SEEN, again
from fuzz.sample_results import results_of

from blockcache.compare.methods import parse_method
from blockcache.results.timings import Timings
from blockcache.tasks import TaskSpec
from blockcache_lab.pages.suite_parts import suite_tables
from blockcache_lab.studies.suite_results import Collection
from blockcache_lab.studies.suites import Cell, Suite
from blockcache_lab.training.data import read_demonstrations, split, window_indices
from blockcache_lab.training.state import Progress, read_state, write_state
from laboratory_formats import EXAMPLES

SPEC = TaskSpec("fuzz", obs_dim=OBS, action_dim=ACTION, max_steps=9, success="none", extra="none")


def make_demonstrations(place: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    arrays = {"obs": rng.random((8, OBS)), "action": rng.random((8, ACTION)), "episode_ends": np.array([3, 8])}
    np.savez(place / "plain.npz", **arrays)
    keypoints = {"keypoint": rng.random((8, 9, 2)), "state": rng.random((8, 5))}
    np.savez(place / "pusht.npz", **keypoints, action=arrays["action"], episode_ends=arrays["episode_ends"])
    return [place / "plain.npz", place / "pusht.npz"]


def use_demonstrations(path: Path) -> None:
    pusht = replace(SPEC, name="pusht", obs_dim=20)
    found = read_demonstrations(pusht if path.name == "pusht.npz" else SPEC, path)
    kept, _ = split(found)
    assert np.isfinite(found.obs[window_indices(kept, 4, SEEN, 2)]).all(), "observations that are not finite"


def _tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(2, 3), "average": torch.ones(2), "count": torch.zeros(1, dtype=torch.int64)}


def make_training_state(place: Path) -> list[Path]:
    write_state(place / "state.safetensors", {"seed": 0, "width": 4}, _tensors(), Progress(3, 1.5, 0.25, None))
    return [place / "state.safetensors"]


def use_training_state(path: Path) -> None:
    found = read_state(path, {"seed": 0, "width": 4}, _tensors())
    f"{found.step + 1} {found.seconds + 1.0:.1f} {found.loss or 0.0:.3f} {found.validation_loss or 0.0:.3f}"
    write_state(again(path), {"seed": 0, "width": 4}, _tensors(), found)


def make_suites(place: Path) -> list[Path]:
    plain = results_of()
    suite = Suite("metrics", "About.", "full", tuple(Cell("Table", method.name) for method in plain.methods))
    results_of(suite=suite.describe()).save(place / "metrics.json")
    seconds = {"p50": 0.1, "p95": 0.2, "p99": 0.2, "seconds": [0.1, 0.2]}
    content = {
        "policy": plain.policy["fingerprint"],
        "machine": {"processor": "abacus", "cores": 2},
        "setting": "seconds per chunk",
        "methods": {method.name: seconds for method in plain.methods},
    }  # fmt: skip
    Timings.FORMAT.save(place / "timings.json", content)
    return [place / "metrics.json", place / "timings.json"]


def use_suites(path: Path) -> None:
    found = Collection.load(path.parent)
    for item in found.suites.values():
        item.command("out")
        for method in item.results.methods:
            parse_method(method.name)
            if found.timings is not None:
                found.timings.over(method.name, "full")
        suite_tables(item, ("method", "n", "GFLOP", "success"))


SAMPLES = {
    "demonstrations": Sample(make_demonstrations, use_demonstrations),
    "training-state": Sample(make_training_state, use_training_state),
    "suites": Sample(make_suites, use_suites),
    **{name: sample_of(EXAMPLES, name) for name in ("analysis", "losses", "distances", "performance", "guard")},
}
