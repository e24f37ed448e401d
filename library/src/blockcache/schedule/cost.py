"""FLOPs of one generation, from the costs of its blocks. Exact whole numbers."""

from __future__ import annotations

from collections.abc import Sequence

from blockcache.errors import ScheduleError
from blockcache.schedule.block import Block
from blockcache.schedule.reuse import Strategy


def generation(
    blocks: Sequence[Block], every_step: int, steps: int, strategy: Strategy | None = None, reused: float = 0.0
) -> int:
    """FLOPs of one whole generation.

    blocks      in execution order, with their costs
    every_step  what a step costs outside the blocks
    strategy    when blocks are computed; without one every block is, at every step
    reused      the share of block computations that was saved, as measured; for strategies that decide as they run
    """
    if strategy is None:
        return steps * (every_step + sum(block.cost for block in blocks))
    if strategy.steps != steps:
        raise ScheduleError(f"the schedule is for {strategy.steps} steps, the generation has {steps}")
    return steps * every_step + strategy.flops(blocks, reused)
