"""The stored result: a small summary of a suite that ships with the package, for the demo to show beside its own.

Written by `blockcache paper results --stored` or `paper frontier --stored` from the suite's file; never by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from blockcache.files import Count, Format, JsonFile, keys_of
from blockcache.measure.statistics import Estimate
from blockcache.results.rollouts import Calibration


@dataclass(frozen=True)
class StoredMethod:
    name: str
    flops: Count
    ms: float | None
    score: Estimate
    difference: Estimate | None  # to the full policy; None for itself


@dataclass(frozen=True)
class Stored(JsonFile):
    task: str
    weights: str  # of the policy that it is true of
    calibration: Calibration
    methods: tuple[StoredMethod, ...]

    def of(self, name: str) -> StoredMethod | None:
        """What is stored of a method, if anything is; what was tuned is stored as "tuned"."""
        return next((method for method in self.methods if method.name == name), None)


Stored.FORMAT = Format("blockcache.stored", "stored result", keys_of(Stored), again="write it again")


def shipped() -> Stored | None:
    """The stored result in the package, if it has one."""
    with resources.as_file(resources.files("blockcache").joinpath("assets", "stored_results.json")) as path:
        return Stored.load(path) if path.exists() else None
