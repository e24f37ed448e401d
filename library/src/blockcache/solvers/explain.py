"""What a recording tells of a schedule: the steps that its union added to, and how unlike what is reused is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import BlockcacheError
from blockcache.schedule import Schedule
from blockcache.solvers.recording import Recording
from blockcache.solvers.solve import solve


def own_steps(recording: Recording, schedule: Schedule) -> Mapping[str, Sequence[int]] | None:
    """What each block's own adaptive steps are by the recording, for a schedule that a union repaired; None if not known.

    Args:
        recording: Of the policy that the schedule is for.
        schedule: Says in its origin how it was solved.
    """
    origin = schedule.origin
    if "union_blocks" not in origin:
        return None
    metric, objective = str(origin.get("metric")), str(origin.get("objective"))
    try:
        last = bool(origin.get("last"))
        return solve(recording, origin.get("updates"), 0, metric, "blockwise", objective, last).updates
    except BlockcacheError:  # the recording lacks the metric, or the origin was written by other code
        return None


def reuse_error(recording: Recording, schedule: Schedule) -> NDArray[np.float64]:
    """(blocks, K): how unlike what would be computed is what was computed last.

    Args:
        recording: Of the same blocks and steps, with the cosine.
        schedule: Which steps are computed.
    """
    found = np.zeros((len(schedule.blocks), schedule.steps))
    steps = np.arange(schedule.steps)
    for row, updates in enumerate(schedule.updates.values()):
        last = np.asarray(updates)[np.searchsorted(updates, steps, side="right") - 1]
        found[row] = 1 - recording.matrices["cosine"][row][last, steps]
    return found
