"""FLOPs of one generation under a schedule, from the costs of its blocks. Exact whole numbers."""

from __future__ import annotations

from collections.abc import Sequence

from blockcache.errors import ScheduleError
from blockcache.schedule.block import Block
from blockcache.schedule.schedule import Schedule


def generation(blocks: Sequence[Block], every_step: int, steps: int, schedule: Schedule | None = None) -> int:
    """FLOPs of one whole generation of `steps` steps; without a schedule every block runs at every step."""
    if schedule is None:
        return steps * (every_step + sum(block.cost for block in blocks))
    if schedule.steps != steps:
        raise ScheduleError(f"the schedule is for {schedule.steps} steps, the generation has {steps}")
    if schedule.blocks != tuple(block.name for block in blocks):
        raise ScheduleError(f"the schedule's {len(schedule.blocks)} blocks are not the {len(blocks)} of this shape")
    return steps * every_step + sum(block.cost * len(schedule.updates[block.name]) for block in blocks)
