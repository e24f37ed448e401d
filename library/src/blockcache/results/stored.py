"""The stored result: a small summary of a suite that ships with the package, for the demo to show beside its own.

Written by `blockcache paper results --stored` or `paper frontier --stored` from the suite's file; never by hand.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from blockcache.files import Count, Format, PathLike
from blockcache.measure.statistics import Estimate
from blockcache.results.rollouts import CALIBRATION


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
        """What is stored of a method, if anything is."""
        return next((method for method in self.methods if method.name == stored_name(name)), None)

    def save(self, path: PathLike) -> None:
        FORMAT.save(path, asdict(self))

    @classmethod
    def load(cls, path: PathLike) -> Stored:
        return cls(**FORMAT.load(path))


def stored_name(name: str) -> str:
    """What was tuned lies in another place on every machine."""
    return "tuned" if name.startswith("tuned:") else name


def shipped() -> Stored | None:
    """The stored result in the package, if it has one."""
    with resources.as_file(resources.files("blockcache").joinpath("assets", "stored_results.json")) as path:
        return Stored.load(path) if path.exists() else None
