"""What a method does to a policy's actions, in six numbers: what its loss in closed loop is predicted from.

Plain arrays in, plain values out; knows nothing of policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist

from blockcache.measure.distance import Cloud, Distances, distances

Chunks = NDArray[np.float64]
"""(observations, samples, actions, A): executed slices in normalised units."""
LEAST_ACTIONS = 3
"""A chunk needs as many actions for a second difference."""


@dataclass(frozen=True)
class ActionFeatures:
    """Means over observations, in normalised units, so that policies with chunks of any size can be compared.

    Args:
        shift: The distance between the means of the method's chunks and of the policy's own, for each value of a chunk.
        beyond_spread: Energy distance over the policy's own spread, less that of a mere change of spread.
        wider: The spread over the policy's own, less 1; below 0 where the method is sharper.
        rougher: The mean second difference along a chunk, less the policy's own, for each value of an action.
        own_spread: The mean distance between two chunks of the policy itself, for each value of a chunk.
        own_roughness: The mean second difference of the policy itself, for each value of an action.
    """

    shift: float
    beyond_spread: float
    wider: float
    rougher: float
    own_spread: float
    own_roughness: float

    def __post_init__(self) -> None:
        for item in fields(self):
            if not math.isfinite(getattr(self, item.name)):
                raise ValueError(f"the feature {item.name} is not finite")


def action_features(found: Chunks, reference: Chunks, apart: Distances | None = None) -> ActionFeatures:
    """The features of a method's chunks beside the policy's own at the same observations.

    Args:
        found: (observations, samples, actions, A) of the method, at least 2 samples.
        reference: The same of the policy as it is; samples at the same place may share their noise.
        apart: How far the two are apart, where that is known already.
    """
    one, other = flattened(found), flattened(reference)
    apart = apart or distances(one, other)
    values = math.sqrt(one.shape[-1])
    rough, own_rough = roughness(found), roughness(reference)
    return ActionFeatures(
        shift=apart.centre_shift.mean / values,
        beyond_spread=apart.beyond_spread.mean,
        wider=apart.spread.mean - 1,
        rougher=rough - own_rough,
        own_spread=float(np.mean([pdist(samples).mean() for samples in other])) / values,
        own_roughness=own_rough,
    )


def flattened(chunks: Chunks) -> Cloud:
    """(observations, samples, features), as distances take them.

    Args:
        chunks: (observations, samples, actions, A).
    """
    return chunks.reshape(*chunks.shape[:2], -1)


def roughness(chunks: Chunks) -> float:
    """The mean length of the second differences along a chunk, for each value of an action; 0 below 3 actions.

    Args:
        chunks: (observations, samples, actions, A) in normalised units.
    """
    if chunks.shape[-2] < LEAST_ACTIONS:
        return 0.0
    return float(np.linalg.norm(np.diff(chunks, n=2, axis=-2), axis=-1).mean()) / math.sqrt(chunks.shape[-1])
