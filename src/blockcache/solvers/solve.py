"""From a recording to a schedule: ACS for each block, then the bubbling union. Named after the paper.

Knows nothing of models or of how a schedule is run.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from blockcache.errors import ScheduleError
from blockcache.schedule import Schedule
from blockcache.schedule.union import bubbling_union
from blockcache.solvers.acs import adaptive, consecutive, uniform
from blockcache.solvers.metrics import METRICS, SIMILARITIES
from blockcache.solvers.recording import Recording

UNION = 5
METHODS = ("bac", "blockwise", "unified", "uniform")
OBJECTIVES = ("anchor", "consecutive")


def most_changing(recording: Recording, count: int) -> tuple[str, ...]:
    """The `count` blocks, of any kind, with the largest scores; the union starts from these."""
    order = np.argsort(-recording.scores, kind="stable")
    return tuple(recording.blocks[index].name for index in order[:count])


def solve(
    recording: Recording,
    updates: int = 10,
    union: int | None = None,
    metric: str = "cosine",
    method: str = "bac",
    objective: str = "anchor",
    last: bool = False,
) -> Schedule:
    """A schedule from a recording.

    recording  what `calibrate` gave
    updates    update steps of each block, S in the paper
    union      how many blocks the bubbling union is over, n in the paper; 5 unless there are fewer blocks
    metric     "cosine" as in the paper, "mse" (often better), "l1" or "wasserstein"
    method     "bac" (ACS per block, then the union), "blockwise" (no union), "unified" (the first block's ACS steps for
               all) or "uniform" (evenly spaced)
    objective  "anchor", or for comparison "consecutive"
    last       compute every block at the last step too, as the authors' released code does; the paper does not say so
    """
    union = min(UNION, len(recording.blocks)) if union is None else union
    _check_choice("method", method, METHODS)
    _check_choice("metric", metric, METRICS)
    _check_choice("objective", objective, OBJECTIVES)
    if not isinstance(union, int) or isinstance(union, bool) or union < 0:
        raise ScheduleError(f"union must be 0 or a positive number of blocks, got {union!r}")
    if union > len(recording.blocks):
        raise ScheduleError(f"union is over {union} blocks, but there are only {len(recording.blocks)}; ask for fewer")
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
    if last:
        steps = {name: tuple(sorted({*own, recording.steps - 1})) for name, own in steps.items()}
        origin |= {"last": True}
    return Schedule(recording.steps, steps, recording.fingerprint, origin)


def _check_choice(what: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ScheduleError(f"unknown {what} {value!r}, known are {', '.join(known)}")
