"""Strategy: what decides when blocks are computed, and the FLOPs of a generation that follows one. Exact whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from blockcache.block import Block
from blockcache.errors import ScheduleError
from blockcache.fingerprint import Fingerprint


class Strategy(Protocol):
    """When blocks are computed. A Schedule knows it beforehand, a TeaCacheRule decides while the policy runs."""

    static: ClassVar[bool]
    """Whether all is decided beforehand; only the patched engine can follow what is not."""

    @property
    def steps(self) -> int: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    def describe(self) -> dict[str, Any]:
        """All that decides the actions, in JSON types."""
        ...

    def flops(self, blocks: Sequence[Block], reused: float) -> int:
        """FLOPs of the blocks computed in one generation; `reused`, as measured, counts where nothing is static."""
        ...


def generation_flops(
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
