"""Where to compute: from similarities to update steps. Pure numpy, named after the paper (METHOD: ACS and BUA).

`adaptive` is the paper's ACS with the anchor objective, `bubbling_union` its BUA, `solve` puts them together. Knows
nothing of models or of how a schedule is run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockcache.blocks import FEED_FORWARD, Block, kind_from_name
from blockcache.errors import RecordingError, ScheduleError
from blockcache.metrics import METRICS, SIMILARITIES
from blockcache.recording import Recording
from blockcache.schedule import Schedule
from blockcache.teacache import Rule as Rule
from blockcache.teacache import fit_teacache as fit_teacache  # the solver whose answer is no schedule

METHODS = ("bac", "blockwise", "unified", "uniform")
OBJECTIVES = ("anchor", "consecutive")


def adaptive(similarity: ArrayLike, updates: int, maximise: bool = True) -> tuple[int, ...]:
    """The `updates` steps (0 among them) that best stand for all K steps; exact.

    Maximises the sum, over all steps t, of similarity[c, t] where c is the last update at or before t. With
    `maximise=False` the matrix holds distances. Of equal optima the lexicographically smallest is returned; sums that
    differ by rounding alone (1e-12 of their size) count as equal.
    """
    matrix = _checked(similarity)
    steps = len(matrix)
    _check_count(updates, steps)
    if not maximise:
        matrix = -matrix
    # gain[i, j]: what steps i..j-1 are worth when all of them use step i; impossible where j <= i
    gain = np.full((steps, steps + 1), -np.inf)
    for i in range(steps):
        np.cumsum(matrix[i, i:], out=gain[i, i + 1 :])
    tail = _tail_values(gain, updates)
    scale = 1e-12 * float(np.abs(matrix).sum(axis=1).max())
    chosen = [0]
    for left in range(updates - 1, 0, -1):
        here = chosen[-1]
        total = gain[here, :steps] + tail[left]
        chosen.append(int(np.argmax(total >= total.max() - scale)))
    return tuple(chosen)


def consecutive(similarity: ArrayLike, updates: int, maximise: bool = True) -> tuple[int, ...]:
    """The paper's printed objective, taken literally: the steps that are least like the step before them.

    Kept for comparison only. Adding up similarities of neighbours leaves nothing to optimise but which values to leave
    out, so the updates crowd where the features move fastest.
    """
    matrix = _checked(similarity)
    steps = len(matrix)
    _check_count(updates, steps)
    neighbour = np.diagonal(matrix, offset=1)  # [t - 1] = similarity of t - 1 and t
    order = np.argsort(neighbour if maximise else -neighbour, kind="stable")
    return (0, *sorted(int(step) + 1 for step in order[: updates - 1]))


def uniform(steps: int, updates: int) -> tuple[int, ...]:
    """Evenly spaced steps from 0."""
    _check_count(updates, steps)
    return tuple(index * steps // updates for index in range(updates))


def bubbling_union(
    schedules: Mapping[str, Sequence[int]],
    upstream: Collection[str],
    blocks: Sequence[Block] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Each block of `upstream` is also computed wherever a feed-forward block strictly behind it is.

    The mapping's order is execution order. Without `blocks` the names' suffixes (SA, CA, FFN) give the kinds.
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


def most_changing(recording: Recording, count: int) -> tuple[str, ...]:
    """The `count` blocks, of any kind, with the largest scores; the union starts from these."""
    order = np.argsort(-recording.scores, kind="stable")
    return tuple(recording.blocks[index].name for index in order[:count])


def solve(
    recording: Recording,
    updates: int = 10,
    union: int = 5,
    metric: str = "cosine",
    method: str = "bac",
    objective: str = "anchor",
) -> Schedule:
    """A schedule with `updates` update steps per block, repaired by a union over `union` blocks.

    Methods: "bac" (ACS per block, then the union), "blockwise" (no union), "unified" (the first block's ACS steps for
    all), "uniform" (evenly spaced). `objective` is "anchor" or, for comparison, "consecutive".
    """
    _check_choice("method", method, METHODS)
    _check_choice("metric", metric, METRICS)
    _check_choice("objective", objective, OBJECTIVES)
    if not isinstance(union, int) or isinstance(union, bool) or union < 0:
        raise ScheduleError(f"union must be 0 or a positive number of blocks, got {union!r}")
    solver = adaptive if objective == "anchor" else consecutive
    names = [block.name for block in recording.blocks]

    def acs(name: str) -> tuple[int, ...]:
        return solver(recording.matrix(metric, name), updates, maximise=metric in SIMILARITIES)

    origin: dict[str, Any] = {"method": method, "updates": updates}
    if method == "uniform":
        steps = dict.fromkeys(names, uniform(recording.steps, updates))
    else:
        origin |= {"metric": metric, "objective": objective, "generations": recording.generations}
        steps = dict.fromkeys(names, acs(names[0])) if method == "unified" else {name: acs(name) for name in names}
    if method == "bac":
        upstream = most_changing(recording, union)
        steps = bubbling_union(steps, upstream, recording.blocks)
        origin |= {"union": union, "union_blocks": list(upstream)}
    return Schedule(recording.steps, steps, recording.fingerprint, origin)


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


def _check_choice(what: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ScheduleError(f"unknown {what} {value!r}, known are {', '.join(known)}")
