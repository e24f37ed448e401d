"""Sound files of evaluations and measurements, and how each is read and used."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockcache.fingerprint import Fingerprint
from blockcache.measure.action_error import ActionError
from blockcache.report.evaluation import evaluation_blocks
from blockcache.results.rollouts import Clocked, MethodRun, Record, Results, check_alike
from blockcache.results.summary import summarise
from toy_evaluation import ready

from .sample_policy import again, policy


def results_of(**setting: Any) -> Results:
    """`setting` is what stands in the file beside what every evaluation has."""
    bound = Fingerprint("dp-t", ("layers.0.SA",), {"width": 8}, 4, {"type": "ddpm"}, "w" * 64)
    methods = [
        MethodRun(name, "loop", {"type": "ddpm"}, reuse, True, 10**6, 0.0, ActionError(0.1, 0.2))
        for name, reuse in (("full", None), ("bac:S=2,n=1", {"updates": {"layers.0.SA": [0, 2]}}))
    ]
    records = [
        Record(method.name, seed, 0.5 + seed / 8, seed > 0, 9, None, 0.1, None) for method in methods for seed in (0, 1)
    ]
    return Results(
        task={"name": "toy", "success": "none", "max_steps": 9},
        policy={"source": "tiny", "fingerprint": bound.to_dict()},
        setting={
            "first_seed": 0, "rollouts": 2, "group": 2, "noise": "keyed", "open_loop_observations": 2,
            "calibration": {"generations": 2, "seed": 0, "observations": "x"}, **setting,
        },
        noise_floor=ActionError(0.1, 0.2),
        methods=tuple(methods),
        records=(*records, Record("full", 2, None, None, 3, "RuntimeError: it broke", None, None)),
    )  # fmt: skip


def _clocked() -> Results:
    plain = results_of()
    latency = {"full": {}, "bac:S=2,n=1": {"chunks": 3, "median_ms": 40.0}}
    clock = {"rate": 10, "replan": 4, "mode": "asynchronous", "latency": latency, "rtc": True, "overlap": 2}
    clocked = tuple(Clocked(item.method, item.seed, 0.25, 3, 1, 0.1, 9.5) for item in plain.records)
    return replace(plain, setting={**plain.setting, "clock": clock}, clocked=clocked)


def make_results(place: Path) -> list[Path]:
    results_of().save(place / "results.json")
    _clocked().save(place / "clocked.json")
    return [place / "results.json", place / "clocked.json"]


def use_results(path: Path) -> None:
    found = Results.load(path)
    found.save(again(path))
    assert Results.load(again(path)) == found
    bound = Fingerprint.from_dict(results_of().policy["fingerprint"])
    clock = found.setting.get("clock")
    check_alike(path, "toy", bound, [("full", {"engine": "loop", "sampler": {"type": "ddpm"}, "reuse": None})], clock)
    summarise(found)
    evaluation_blocks(found)


def make_jobs(place: Path) -> list[Path]:
    """The finished jobs of a whole evaluation of the toy task."""
    _evaluation(place).run(progress=False)
    return sorted((place / "state").glob("*.json"))


def use_jobs(path: Path) -> None:
    results = _evaluation(path.parents[1]).run(progress=False)
    results.save(path.with_name("results"))
    Results.load(path.with_name("results"))


@functools.cache
def _evaluation(place: Path) -> Any:
    return ready(policy(5, 3), place / "state", methods=(), rollouts=1, group=1)
