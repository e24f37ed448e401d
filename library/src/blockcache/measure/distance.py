"""How far one cloud of actions lies from another: what predicts a method's loss in closed loop without a rollout.

A cloud is (observations, samples, features): for each observation so many chunks drawn by one method, each the executed
slice in normalised units, flattened. The two clouds are over the same observations. Samples at the same place may share
their noise, which makes the estimates steadier and adds no bias, since no estimate looks at such a pair. Estimates of a
distance scatter around 0 for equal distributions, so they are negative about every other time. Plain arrays in, plain
values out; knows nothing of policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist, pdist

from blockcache.measure.statistics import Estimate, interval_of

Cloud = NDArray[np.float64]
"""(observations, samples, features)."""
CUTS = 32


@dataclass(frozen=True)
class Distances:
    """Each is a mean over all observations with a 95 % interval by resampling these.

    Args:
        centre_shift: The distance between the two clouds' means.
        energy: 2 E|X - Y| - E|X - X'| - E|Y - Y'|, over the mean distance between two samples of the reference.
        spread: The mean distance between two samples of the one over that of the other; 1 where nothing is lost.
        beyond_spread: What is left of `energy` without that of a mere change of spread, which does no harm in closed loop.
    """

    centre_shift: Estimate
    energy: Estimate
    spread: Estimate
    beyond_spread: Estimate


def distances(found: Cloud, reference: Cloud) -> Distances:
    """All distances of a method's cloud from the reference's.

    Args:
        found: (observations, samples, features) of the method that is judged.
        reference: The same of the policy as it is; it may have more samples or fewer.
    """
    between, own, others = pair_distances(found, reference)
    if not others.any():
        raise ValueError("the reference's samples are all equal, so there is no spread to measure a distance against")
    energy = 2 * between - own - others  # unbiased, in the unit of the features
    return Distances(
        interval_of(np.positive, shifts(found, reference)),
        interval_of(np.divide, energy, others),
        interval_of(np.divide, own, others),
        interval_of(lambda e, x, y: e / y - energy_of_spread(x / y), energy, own, others),
    )


def shifts(found: Cloud, reference: Cloud) -> NDArray[np.float64]:
    """Distance between the means for each observation.

    The means' own scatter would put a floor beneath it. So the samples are cut into two halves, which give two independent
    estimates of the difference, and the distance is the root of their product; where the two point away from each other the
    product is negative, and so is its signed root. It is the mean over many random cuts. For equal distributions it is 0 on
    average; a shift that is small against the scatter comes out too small, never too large.

    Args:
        found: (observations, samples, features) of the method that is judged.
        reference: The same of the policy as it is; it may have more samples or fewer.
    """
    one, other = _checked(found, reference)
    most = max(one.shape[1], other.shape[1])
    heads = np.random.default_rng(0).integers(2, size=(CUTS, (most + 1) // 2))
    side = np.stack((heads, 1 - heads), axis=-1).reshape(CUTS, -1)  # neighbours always part, so that halves are even
    a, b = (_means(one, half) - _means(other, half) for half in (side, 1 - side))
    rooted: NDArray[np.float64] = signed_root((a * b).sum(axis=-1)).mean(axis=1)
    return rooted


def pair_distances(found: Cloud, reference: Cloud) -> tuple[NDArray[np.float64], ...]:
    """Mean Euclidean distance between two samples for each observation: one of either cloud, both of `found`, both of
    `reference`. A sample is paired neither with itself nor with what has its place.

    Args:
        found: (observations, samples, features) of the method that is judged.
        reference: The same of the policy as it is; it may have more samples or fewer.
    """
    one, other = _checked(found, reference)
    apart = ~np.eye(one.shape[1], other.shape[1], dtype=bool)
    between = np.array([cdist(x, y)[apart].mean() for x, y in zip(one, other, strict=True)])
    return between, *(np.array([pdist(samples).mean() for samples in cloud]) for cloud in (one, other))


def energy_of_spread(spread: NDArray[np.float64]) -> NDArray[np.float64]:
    """The energy distance, over the reference's spread, of normal clouds that differ in this ratio of spreads alone.

    Args:
        spread: For each observation, the mean distance between two samples of the one cloud over that of the other.
    """
    value: NDArray[np.float64] = np.sqrt(2 * (1 + spread**2)) - 1 - spread
    return value


def signed_root(square: NDArray[np.float64]) -> NDArray[np.float64]:
    """The root of an estimated square; minus the root of its amount where chance put it below 0."""
    value: NDArray[np.float64] = np.copysign(np.sqrt(np.abs(square)), square)
    return value


def _means(cloud: Cloud, half: NDArray[np.int64]) -> NDArray[np.float64]:
    """(observations, cuts, features): the mean over those samples that each cut has on this side."""
    chosen = half[:, : cloud.shape[1]]
    means: NDArray[np.float64] = (chosen / chosen.sum(axis=1, keepdims=True)) @ cloud
    return means


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
