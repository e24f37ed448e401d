"""How far a measurement agrees with itself. Plain arrays in, plain values out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from blockcache.measure.statistics import rank_correlation

SEED = 0


def split_half(values: ArrayLike, rounds: int = 100) -> float:
    """How far (methods, episodes) agree with themselves: the mean rank correlation of the methods' means over one random
    half of the episodes and over the other. No predictor can be asked to do better than the measurement itself."""
    values = np.asarray(values, np.float64)
    draw, half = np.random.default_rng(SEED), values.shape[1] // 2
    found = []
    for _ in range(rounds):
        order = draw.permutation(values.shape[1])
        one, other = values[:, order[:half]], values[:, order[half:]]
        found.append(rank_correlation(one.mean(axis=1), other.mean(axis=1)))
    return float(np.mean(found))
