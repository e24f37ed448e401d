"""Every kind of file that the laboratory reads: as `file_formats` has those of the library."""

from __future__ import annotations

import functools
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockcache.files import write_arrays
from blockcache.measure.distance import Distances
from blockcache.measure.statistics import Estimate
from blockcache.results.rollouts import Results
from blockcache.results.summary import summarise
from blockcache.tasks import task_spec
from blockcache_lab.analysis.claims import claims
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.pages import guard, performance
from blockcache_lab.studies.distances import FrontierDistances, MethodDistances, Modes
from blockcache_lab.studies.loss_data import LossData, LossDataError, LossRow, judge
from blockcache_lab.studies.suites import Cell, Suite, suite_of
from blockcache_lab.training.data import read_demonstrations
from blockcache_lab.training.state import Progress, read_state, write_state
from file_formats import FEATURES, FINGERPRINT, METHODS, RUN, Example, write_results
from toy_analysis import toy_analysis


def write_analysis(directory: Path) -> Path:
    toy_analysis().save(directory / "analysis.safetensors")
    return directory / "analysis.safetensors"


def load_analysis(path: Path) -> Any:
    found = Analysis.load(path)
    found.save(path.with_name("again.safetensors"))
    return claims(found)


def write_suite(directory: Path) -> Path:
    suite = Suite("main", "All.", None, tuple(Cell("One", name) for name in METHODS))
    return write_results(directory, suite=suite.describe())


def load_suite(path: Path) -> Any:
    results = Results.load(path)
    return summarise(results), suite_of(results, path)


def write_losses(directory: Path) -> Path:
    rows = [
        LossRow(
            task=f"task {task}",
            family="dp-t",
            policy="toy",
            method=f"method {lost}",
            ran="0123456789abcdef",
            cost=0.5,
            actions=8,
            features=FEATURES,
            difference=Estimate(-lost, -lost - 0.02, 0.02 - lost, 50),
        )
        for task in range(3)
        for lost in (0.0, 0.1)
    ]
    LossData(9, 4, tuple(rows)).save(directory / "losses.json")
    return directory / "losses.json"


def load_losses(path: Path) -> Any:
    found = LossData.load(path)
    try:
        return found.model.predict(FEATURES, "dp-t", 8), judge(found)
    except LossDataError:  # too few tasks
        return found


def write_frontier_distances(directory: Path) -> Path:
    distances = Distances(**{item.name: Estimate(0.5, 0.4, 0.6, 9) for item in fields(Distances)})
    methods = {
        "ddpm-3": MethodDistances(distances, None),
        "fitted-3": MethodDistances(distances, Modes(2, 0.2, 0.1, 0.1, 1)),
    }
    found = FrontierDistances(FINGERPRINT, {"samples": 4}, 16, distances, methods)
    found.save(directory / "distances.json")
    return directory / "distances.json"


STATE = {"weights": torch.ones(3, 2), "step": torch.tensor(3)}


RUN_OF_STATE = {"task": "toy", "lr": 1e-3, "seed": 0}


def write_training_state(directory: Path) -> Path:
    write_state(directory / "s.safetensors", RUN_OF_STATE, STATE, Progress(3, 1.5, 0.25, None))
    return directory / "s.safetensors"


def load_training_state(path: Path) -> Any:
    return read_state(path, RUN_OF_STATE, {name: tensor.clone() for name, tensor in STATE.items()})


def write_performance(directory: Path) -> Path:
    times = {"patched": 4.0, "loop": 3.0, "onnx_1": 2.0, "onnx_n": 1.0}
    foot = dict.fromkeys(
        (
            "weights_mb",
            "file_mb",
            "export_s",
            "load_s",
            "peak_over_weights",
            "peak_mb",
            "growth_mb",
            "p50_ms",
            "p99_ms",
        ),
        1.5,
    )
    content = {
        "bench": RUN,
        "shapes": [{"name": "wide", "ms": times, "difference": times}],
        "footprint": {"8 x 256": {**foot, "calls": 3, "generations": 4}},
        "calibration": {
            **dict.fromkeys(("observations", "blocks", "steps"), 4),
            **dict.fromkeys(("plain_s", "costs_s", "plain_mb", "costs_mb", "solve_s"), 1.5),
        },
    }
    performance.FORMAT.save(directory / "performance.json", content)
    return directory / "performance.json"


def load_page(kind: Any, path: Path) -> Any:
    with kind.FORMAT.reading(path):
        return kind.page(kind.FORMAT.load(path))


def write_guard(directory: Path) -> Path:
    scores = {way: [0.5, 1.0] for way in (guard.FULL, guard.ALONE, guard.FALLING_BACK)}
    shares = dict.fromkeys(("outside", "repeated", "episodes", "changes"), 0.5)
    content = {
        "command": "blockcache paper guard pusht",
        "shift": "none",
        "words": "nothing is changed",
        "rollouts": 2,
        "first_seed": 170_000,
        "observations": 64,
        "rows": [{"method": "tuned", "chunks": 4, "scores": scores, **shares}],
        "others": [{"guard": "pusht", "outside": {"pusht": 0.0}}],
    }
    guard.FORMAT.save(directory / "guard.json", content)
    return directory / "guard.json"


def load_guard(path: Path) -> Any:
    with guard.FORMAT.reading(path):
        return guard.page([guard.FORMAT.load(path)])


def write_demonstrations(directory: Path) -> Path:
    arrays = {"keypoint": np.ones((8, 9, 2), np.float32), "state": np.ones((8, 5)), "action": np.ones((8, 2))}
    write_arrays(directory / "demos.npz", **arrays, episode_ends=np.array([4, 8]))
    return directory / "demos.npz"


EXAMPLES = [
    Example("analysis", write_analysis, load_analysis, ("blockcache.analysis",)),
    Example("suite", write_suite, load_suite, ("blockcache.results",)),
    Example("losses", write_losses, load_losses, ("blockcache.losses",)),
    Example("distances", write_frontier_distances, FrontierDistances.load, ("blockcache.frontier-distances",)),
    Example("training state", write_training_state, load_training_state, ("blockcache-training-state",)),
    Example("performance", write_performance, functools.partial(load_page, performance), ("blockcache.performance",)),
    Example("guard", write_guard, load_guard, ("blockcache.guard",)),
    Example("demonstrations", write_demonstrations, lambda path: read_demonstrations(task_spec("pusht"), path)),
]
