"""What one segment costs the executed action: a block computed at step s and reused up to step e. Arrays in, arrays out.

To first order, reusing at step k what a block added at step s moves the action along a vector v by the product of
d(v . action)/d residual(k) with residual(s) - residual(k). Inside a segment these movements add up, so they are summed
before they are squared; the mean of the squares over v is the squared error of the action. Knows nothing of gradients.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

KEPT = 0.75
"""The share of the observations that a cost is the mean of. Some sit at a fork of the task and have linear costs far
beyond what ever happens to the action; they would decide everything."""


def segment_costs(products: NDArray[np.float32]) -> NDArray[np.float32]:
    """(..., V, blocks, K, K) products [s, k] for V vectors, 0 unless k > s -> (..., blocks, K, K) costs [s, e]."""
    moved = np.cumsum(products, axis=-1)
    costs: NDArray[np.float32] = np.square(moved, out=moved).mean(axis=-4)
    return costs


def lower_mean(costs: NDArray[np.float32], kept: float = KEPT) -> NDArray[np.float64]:
    """(observations, ...) -> (...): for each entry the mean of the lowest `kept` of the observations."""
    count = math.ceil(kept * len(costs))
    lowest = costs if count == len(costs) else np.partition(costs, count - 1, axis=0)[:count]
    mean: NDArray[np.float64] = lowest.mean(axis=0, dtype=np.float64)
    return mean
