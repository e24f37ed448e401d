"""How far each method's actions are from the policy's own. A frozen value with a JSON file format.

Knows nothing of torch or of how actions are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockcache.files import Count, Format, JsonFile, keys_of
from blockcache.fingerprint import Fingerprint
from blockcache.measure.distance import Distances


@dataclass(frozen=True)
class Modes:
    """Over the observations at which the reference has two modes.

    Args:
        forks: How many of all observations are forks.
        reference: Mean share of the samples in the smaller mode, by the reference.
        found: The same by the method, counted in the reference's modes.
        apart: Mean absolute difference of the two shares, observation by observation.
        dropped: Forks at which the method never takes the smaller mode.
    """

    forks: int
    reference: float
    found: float
    apart: float
    dropped: int


@dataclass(frozen=True)
class MethodDistances:
    """How far a method's cloud of actions is from the policy's own, and whether it takes the same modes at forks."""

    distances: Distances
    modes: Modes | None


@dataclass(frozen=True)
class FrontierDistances(JsonFile):
    """Distances of all methods of a suite, at the same observations and with the same noise.

    Args:
        policy: Whose methods they are.
        setting: Observations, samples and seed.
        features: Values in an executed chunk.
        floor: Of one half of the policy's own cloud from the other.
        methods: By name; the policy as it comes is not among them.
    """

    policy: Fingerprint
    setting: Mapping[str, Any]
    features: Count
    floor: Distances
    methods: Mapping[str, MethodDistances]


FrontierDistances.FORMAT = Format(
    "blockcache.frontier-distances",
    "distances",
    keys_of(FrontierDistances),
    again="run 'blockcache paper distances' again",
)
