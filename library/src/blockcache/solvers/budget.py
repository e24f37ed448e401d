"""One budget for all blocks: how often each is computed, and when, so that the action's error is least.

For each block the dynamic programme of ACS gives the best schedule for every number of updates. The numbers are raised
where an update gains most for its cost, along the lower hulls of the blocks' errors: what is spent so could not be spent
better. What the next piece of a hull does not fit into goes to the best raises that do. Arrays in, steps out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import ScheduleError
from blockcache.solvers.bac import Segments

Array = NDArray[np.float64]
WORK = 25 * 10**9
"""Sums in the dynamic programme, half a minute's work; more than that is refused."""


@dataclass(frozen=True)
class Split:
    """Update steps by block, the error that is expected of them, and what they cost."""

    steps: tuple[tuple[int, ...], ...]
    error: float
    spent: float


def split_budget(costs: Array, prices: Sequence[float], limit: float) -> Split:
    """The schedules of all blocks with the least error, as far as the budget allows.

    Args:
        costs: (blocks, K, K): [b, s, e] is the error of computing block b at step s and reusing it up to step e.
        prices: What one update of each block costs, positive.
        limit: What all updates together may cost; one for each block at least.
    """
    blocks, steps = costs.shape[:2]
    if blocks * steps**3 > WORK:
        raise ScheduleError(
            f"{blocks} blocks of {steps} steps are more than this solver takes; calibrate with a sampler of fewer steps"
        )
    limit *= 1 + 1e-12  # a budget that is just enough must not fail by rounding
    solved = [_segments(block) for block in costs]
    errors = np.array([[-item.value(count) for count in range(1, steps + 1)] for item in solved])
    counts = split_counts(errors, prices, limit)
    chosen = tuple(item.choose(count) for item, count in zip(solved, counts, strict=True))
    error = sum(float(errors[block, count - 1]) for block, count in enumerate(counts))
    return Split(chosen, error, float(np.dot(counts, prices)))


def split_counts(errors: Array, prices: Sequence[float], limit: float) -> list[int]:
    """How often each block is computed; errors (blocks, K) are those of each block with 1, 2, ... K updates."""
    counts, left = [1] * len(errors), limit - sum(prices)
    pieces = [
        (rate / price, block, count) for block, price in enumerate(prices) for rate, count in _hull(errors[block])
    ]
    for _, block, count in sorted(pieces, key=lambda piece: -piece[0]):  # stable: a block's own stay in order
        price = prices[block] * (count - counts[block])
        if price > left:
            break
        counts[block] = count
        left -= price
    while True:
        raises = [_best_raise(errors[block], counts[block], left / price) for block, price in enumerate(prices)]
        block = int(np.argmax([rate / price for (rate, _), price in zip(raises, prices, strict=True)]))
        rate, count = raises[block]
        if rate <= 0:
            return counts
        left -= prices[block] * (count - counts[block])
        counts[block] = count


def _best_raise(errors: Array, count: int, room: float) -> tuple[float, int]:
    """The largest gain per update that `room` more updates allow, and the number of updates that has it."""
    gains = errors[count - 1] - errors[count : count + int(room)]
    if not gains.size:
        return 0.0, count
    rates = gains / np.arange(1, len(gains) + 1)
    best = int(rates.argmax())
    return float(rates[best]), count + 1 + best


def _hull(errors: Array) -> list[tuple[float, int]]:
    """The falling pieces of the lower convex hull of (updates, error): gain per update, and the updates at its end."""
    hull: list[tuple[int, float]] = []
    for point in enumerate(errors.tolist(), start=1):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) > _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    pieces: list[tuple[float, int]] = []
    for low, high in pairwise(hull):
        rate = min(-_slope(low, high), pieces[-1][0] if pieces else np.inf)  # never rising, not by rounding either
        if rate > 0:
            pieces.append((rate, high[0]))
    return pieces


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


def _segments(costs: Array) -> Segments:
    steps = len(costs)
    gain = np.full((steps, steps + 1), -np.inf)
    upper = np.triu_indices(steps)
    gain[upper[0], upper[1] + 1] = -costs[upper]
    return Segments(gain, steps, float(costs[upper].max()))
