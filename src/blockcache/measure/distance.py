"""How far one cloud of actions lies from another, observation by observation: what predicts a method's loss in closed loop
without a rollout. Plain arrays in, plain values out; knows nothing of policies.

A cloud is (observations, samples, features): for each observation so many chunks drawn by one method, each the executed
slice in normalised units, flattened. The two clouds are over the same observations, drawn with independent noise, and may
differ in their number of samples. All three are about whole distributions: two draws of one sampler are at distance 0.

- centre shift: the distance between the two clouds' means;
- energy distance, over the mean distance between two samples of the reference, so that it has no unit;
- spread: the mean distance between two samples of the one over that of the other; 1 where nothing is lost.

Estimates are unbiased where a distance is concerned (its square, for the centre shift), so they scatter around 0 for equal
distributions and are negative about every other time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist, pdist

from blockcache.measure.statistics import Estimate, ratio_interval

Cloud = NDArray[np.float64]
"""(observations, samples, features)."""


@dataclass(frozen=True)
class Distances:
    """Each over all observations, with a 95 % interval by resampling these."""

    centre_shift: Estimate
    """Root of the mean squared shift. A square that is estimated below 0 has minus the root of its amount: such a value says
    by its size how much the estimate scatters, and by its sign that no shift was seen."""
    energy: Estimate
    spread: Estimate


@dataclass(frozen=True, eq=False)
class PairDistances:
    """Mean distance between two samples for each observation, (observations,): of either cloud, inside each of them."""

    between: NDArray[np.float64]
    inside_found: NDArray[np.float64]
    inside_reference: NDArray[np.float64]

    @property
    def energy(self) -> NDArray[np.float64]:
        """2 E|X - Y| - E|X - X'| - E|Y - Y'|, unbiased, in the unit of the features; 0 for equal distributions only."""
        return 2 * self.between - self.inside_found - self.inside_reference


def distances(found: Cloud, reference: Cloud) -> Distances:
    """All three distances of a method's cloud from the reference's.

    found      (observations, samples, features) of the method that is judged
    reference  the same of the policy as it is, at the same observations, with noise of its own
    """
    pairs = pair_distances(found, reference)
    if not pairs.inside_reference.any():
        raise ValueError("the reference's samples are all equal, so there is no spread to measure a distance against")
    ones = np.ones(len(pairs.between))
    return Distances(
        _rooted(ratio_interval(squared_shifts(found, reference), ones)),
        ratio_interval(pairs.energy, pairs.inside_reference),
        ratio_interval(pairs.inside_found, pairs.inside_reference),
    )


def squared_shifts(found: Cloud, reference: Cloud) -> NDArray[np.float64]:
    """Squared distance between the means for each observation, unbiased: what the means scatter by is taken off again."""
    one, other = _checked(found, reference)
    scatter = sum(cloud.var(axis=1, ddof=1).sum(axis=-1) / cloud.shape[1] for cloud in (one, other))
    apart: NDArray[np.float64] = ((one.mean(axis=1) - other.mean(axis=1)) ** 2).sum(axis=-1) - scatter
    return apart


def pair_distances(found: Cloud, reference: Cloud) -> PairDistances:
    """Mean Euclidean distances for each observation; a sample is never paired with itself."""
    one, other = _checked(found, reference)
    return PairDistances(
        np.array([cdist(x, y).mean() for x, y in zip(one, other, strict=True)]),
        np.array([pdist(x).mean() for x in one]),
        np.array([pdist(y).mean() for y in other]),
    )


def signed_root(square: float) -> float:
    """The root of an estimated square; minus the root of its amount where chance put it below 0. It keeps the order."""
    return math.copysign(math.sqrt(abs(square)), square)


def _rooted(square: Estimate) -> Estimate:
    return Estimate(signed_root(square.mean), signed_root(square.low), signed_root(square.high), square.n)


def _checked(found: Cloud, reference: Cloud) -> tuple[Cloud, Cloud]:
    one, other = np.asarray(found, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    alike = one.ndim == other.ndim == 3 and (len(one), one.shape[2]) == (len(other), other.shape[2])
    if not alike or 0 in one.shape or min(one.shape[1], other.shape[1]) < 2:
        raise ValueError(
            "clouds need the shape (observations, samples, features), at least 2 samples and the same observations and "
            f"features on both sides, got {one.shape} and {other.shape}"
        )
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise ValueError("clouds need finite actions, got NaN or infinity")
    return one, other
