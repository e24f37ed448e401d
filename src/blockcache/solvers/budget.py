"""One budget for all blocks: how often each is computed, and when, so that the action's error is least.

For each block the dynamic programme of ACS gives the best schedule for every number of updates. The numbers are raised
where an update gains most for its cost, along the lower hulls of the blocks' errors: what is spent then could not be spent
better. What the next piece of a hull does not fit into goes to the best raises that do. Arrays in,
steps out; knows nothing of recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import ScheduleError
from blockcache.solvers.acs import Segments

Array = NDArray[np.float64]
WORK = 5 * 10**10
"""Sums of the dynamic programme, some ten seconds; more than that is refused."""


@dataclass(frozen=True)
class Split:
    """Update steps by block, the error that is expected of them, and what they cost."""

    steps: tuple[tuple[int, ...], ...]
    error: float
    spent: float


def split_budget(costs: Array, prices: Sequence[float], limit: float) -> Split:
    """The schedules of all blocks with the least error, as far as the budget allows.

    costs   (blocks, K, K): [b, s, e] is the error of computing block b at step s and reusing it up to step e
    prices  what one update of each block costs, positive
    limit   what all updates together may cost; one for each block at least
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
    """How often each block is computed.

    errors  (blocks, K): the error of each block with 1, 2, ... K updates
    """
    counts, left = [1] * len(errors), limit - sum(prices)
    hulls = [_hull(row) for row in errors]

    def next_piece(block: int, count: int, room: float) -> tuple[float, int]:
        return next(((rate / prices[block], high) for rate, high in hulls[block] if high > count), (0.0, count))

    def best_raise(block: int, count: int, room: float) -> tuple[float, int]:
        rates = (errors[block, count - 1] - errors[block, count:]) / np.arange(1, len(errors[block]) - count + 1)
        rates = rates[: int(room / prices[block])]
        return (float(rates.max() / prices[block]), count + 1 + int(rates.argmax())) if rates.size else (0.0, count)

    for option in (next_piece, best_raise):
        while True:
            options = [option(block, count, left) for block, count in enumerate(counts)]
            block = int(np.argmax([rate for rate, _ in options]))  # the first of equal ones
            rate, count = options[block]
            price = prices[block] * (count - counts[block])
            if rate <= 0 or price > left:
                break
            counts[block] = count
            left -= price
    return counts


def _hull(errors: Array) -> list[tuple[float, int]]:
    """The falling pieces of the lower convex hull of (updates, error): gain per update, and the updates at the end."""
    hull: list[tuple[int, float]] = []
    for point in enumerate(errors.tolist(), start=1):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) > _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    pieces = [(-_slope(low, high), high[0]) for low, high in pairwise(hull)]
    return [(rate, count) for rate, count in pieces if rate > 0]


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


def _segments(costs: Array) -> Segments:
    steps = len(costs)
    gain = np.full((steps, steps + 1), -np.inf)
    upper = np.triu_indices(steps)
    gain[upper[0], upper[1] + 1] = -costs[upper]
    return Segments(gain, steps, float(costs[upper].max()))
