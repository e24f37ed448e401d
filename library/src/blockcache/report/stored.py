"""The stored result: a small summary of a suite that ships with the package, for the demo to show beside its own.

Written by `blockcache paper results --stored` or `paper frontier --stored` from the suite's file; never by hand.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from blockcache.errors import FileError
from blockcache.files import Count, Format, PathLike
from blockcache.measure.statistics import Estimate
from blockcache.report.suites import Collection
from blockcache.results.rollouts import CALIBRATION
from blockcache_lab.studies.suites import FRONTIER


@dataclass(frozen=True)
class StoredMethod:
    name: str
    flops: Count
    ms: float | None
    score: Estimate
    difference: Estimate | None  # to the full policy; None for itself


FORMAT = Format(
    "blockcache.stored",
    "stored result",
    {"task": str, "weights": str, "calibration": CALIBRATION, "methods": tuple[StoredMethod, ...]},
    again="write it again",
)


@dataclass(frozen=True)
class Stored:
    task: str
    weights: str  # of the policy that it is true of
    calibration: dict[str, Any]
    methods: tuple[StoredMethod, ...]

    def of(self, name: str) -> StoredMethod | None:
        return next((method for method in self.methods if method.name == _kept(name)), None)

    def save(self, path: PathLike) -> None:
        FORMAT.save(path, asdict(self))

    @classmethod
    def load(cls, path: PathLike) -> Stored:
        return cls(**FORMAT.load(path))


def summarise_suite(collection: Collection, suite: str = FRONTIER) -> Stored:
    """Only of real results: a quick run stores nothing."""
    if suite not in collection.suites:
        raise FileError(
            f"a stored result needs the suite {suite}, which is not there; run 'blockcache paper suite {suite} POLICY'"
        )
    found = collection.suites[suite]
    if found.suite.quick:
        raise FileError(
            f"a quick run is no result to store; run 'blockcache paper suite {suite} POLICY' without --quick"
        )
    timings = collection.timings
    methods = [
        StoredMethod(_kept(name), row.method.flops, timings.ms(name) if timings else None, row.score, row.difference)
        for name, row in found.rows.items()
        if row.score is not None and row.score.n > 1  # a single rollout has no interval to write down
    ]
    results = found.results
    weights, calibration = results.policy["fingerprint"]["weights"], dict(results.setting["calibration"])
    return Stored(results.task["name"], weights, calibration, tuple(methods))


def _kept(name: str) -> str:
    """What was tuned lies in another place on every machine."""
    return "tuned" if name.startswith("tuned:") else name


def shipped() -> Stored | None:
    """The stored result in the package, if it has one."""
    with resources.as_file(resources.files("blockcache").joinpath("assets", "stored_results.json")) as path:
        return Stored.load(path) if path.exists() else None
