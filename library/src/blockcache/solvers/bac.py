"""The paper's BAC in its two parts: at which steps one block is computed (ACS), and the bubbling union of the blocks (BUA).

Beside ACS, which is exact, stand simpler choices of steps. Knows nothing of recordings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockcache.block import FEED_FORWARD, Block, kind_from_name
from blockcache.errors import RecordingError, ScheduleError


def adaptive(similarity: ArrayLike, updates: int, maximise: bool = True) -> tuple[int, ...]:
    """The `updates` steps (0 among them) that best stand for all K steps; exact.

    Maximises the sum, over all steps t, of similarity[c, t] where c is the last update at or before t. Of equal optima the
    lexicographically smallest is returned; sums that differ by rounding alone (1e-12 of their size) count as equal.

    Args:
        similarity: (K, K), how alike the block's outputs at two steps are.
        updates: How many steps to choose.
        maximise: False where the matrix holds distances.
    """
    matrix = _checked(similarity)
    steps = len(matrix)
    _check_count(updates, steps)
    if not maximise:
        matrix = -matrix
    gain = np.full((steps, steps + 1), -np.inf)
    for i in range(steps):
        np.cumsum(matrix[i, i:], out=gain[i, i + 1 :])
    return Segments(gain, updates, float(np.abs(matrix).sum(axis=1).max())).choose(updates)


class Segments:
    """The best division of K steps into segments, exactly, for every number of segments up to a limit.

    Args:
        gain: (K, K + 1): what the segment of steps i..j-1 is worth at [i, j], -inf where j <= i.
        limit: The largest number of segments that is asked for.
        size: Of what is added up in `gain`; sums that differ by 1e-12 of it count as equal.
    """

    def __init__(self, gain: NDArray[np.float64], limit: int, size: float) -> None:
        self._gain = gain
        self._tail = _tail_values(gain, limit)
        self._tolerance = 1e-12 * size

    def value(self, count: int) -> float:
        """What the best division into `count` segments is worth."""
        steps = len(self._gain)
        if count == 1:
            return float(self._gain[0, steps])
        return float((self._gain[0, :steps] + self._tail[count - 1]).max())

    def choose(self, count: int) -> tuple[int, ...]:
        """The first steps of the best segments; of equal divisions the lexicographically smallest."""
        steps, chosen = len(self._gain), [0]
        for left in range(count - 1, 0, -1):
            total = self._gain[chosen[-1], :steps] + self._tail[left]
            chosen.append(int(np.argmax(total >= total.max() - self._tolerance)))
        return tuple(chosen)


def consecutive(similarity: ArrayLike, updates: int, maximise: bool = True) -> tuple[int, ...]:
    """The paper's printed objective, taken literally: the steps that are least like the step before them.

    For comparison: the updates crowd where the features move fastest. Arguments as for `adaptive`.
    """
    matrix = _checked(similarity)
    steps = len(matrix)
    _check_count(updates, steps)
    neighbour = np.diagonal(matrix, offset=1)  # [t - 1] = similarity of t - 1 and t
    order = np.argsort(neighbour if maximise else -neighbour, kind="stable")
    return (0, *sorted(int(step) + 1 for step in order[: updates - 1]))


def uniform(steps: int, updates: int) -> tuple[int, ...]:
    """Evenly spaced steps from 0.

    Args:
        steps: Of a generation.
        updates: How many of them are wanted.
    """
    _check_count(updates, steps)
    return tuple(index * steps // updates for index in range(updates))


def bubbling_union(
    schedules: Mapping[str, Sequence[int]], upstream: Collection[str], blocks: Sequence[Block] | None = None
) -> dict[str, tuple[int, ...]]:
    """Each block of `upstream` is also computed wherever a feed-forward block strictly behind it is.

    Args:
        schedules: Update steps by block, in execution order.
        upstream: The blocks that the union is over.
        blocks: Give the kinds; without them the names' suffixes do (SA, CA, FFN).
    """
    names = list(schedules)
    kinds = {block.name: block.kind for block in blocks} if blocks else {name: kind_from_name(name) for name in names}
    for what, given in (("upstream", upstream), ("schedules", names)):
        unknown = [name for name in given if name not in kinds or name not in schedules]
        if unknown:
            raise ScheduleError(f"unknown block {unknown[0]!r} in {what}; the blocks are {', '.join(names)}")
    result: dict[str, tuple[int, ...]] = {}
    behind: set[int] = set()  # update steps of all feed-forward blocks after the current one
    for name in reversed(names):
        own = {int(step) for step in schedules[name]}
        result[name] = tuple(sorted(own | behind if name in upstream else own))
        if kinds[name] == FEED_FORWARD:
            behind |= own
    return {name: result[name] for name in names}


def _tail_values(gain: NDArray[np.float64], updates: int) -> list[NDArray[np.float64]]:
    """tail[s][i]: the best value of steps i..K-1 with s updates, the first of them at i. tail[0] is unused."""
    steps, rows = len(gain), 64
    tail = [np.full(steps, -np.inf), gain[:, steps].copy()]
    total = np.empty((rows, steps))  # a band of rows at a time stays in the processor's cache
    for _ in range(updates - 2):
        best = np.empty(steps)
        for top in range(0, steps, rows):
            band = np.add(gain[top : top + rows, top:steps], tail[-1][top:], out=total[: steps - top, : steps - top])
            band.max(axis=1, out=best[top : top + rows])
        tail.append(best)
    return tail


def _checked(similarity: ArrayLike) -> NDArray[np.float64]:
    matrix = np.asarray(similarity, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise RecordingError(f"similarities must be a square matrix, got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise RecordingError("similarities hold NaN or infinity; calibrate again on sound observations")
    return matrix


def _check_count(updates: int, steps: int) -> None:
    if not isinstance(updates, int) or isinstance(updates, bool) or not 1 <= updates <= steps:
        raise ScheduleError(f"updates must be a whole number from 1 to the number of steps {steps}, got {updates!r}")
