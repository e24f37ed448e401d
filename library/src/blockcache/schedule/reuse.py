"""What a block adds when it is not computed, what is kept for that and when it dies. Defined here and nowhere else.

The rule: a block that is skipped adds the residual of its last update again, unchanged. A gate, where a model has one,
is applied after that, with its present value. Every engine and every analysis reads the rule from `Reuse`, one of which
lives as long as one generation. Knows nothing of what a residual is: only sums of them are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from blockcache.schedule.plan import AddRun, Compute, Plan, Span

T = TypeVar("T")


class Reuse(Generic[T]):
    """The residuals of one generation.

    Args:
        plan: When blocks are computed.
        add: Makes the sum of several: of tensors, or of nodes of a graph; whoever goes block by block needs none.
    """

    def __init__(self, plan: Plan, add: Callable[[Sequence[T]], T] = lambda values: values[0]) -> None:
        self._plan = plan
        self._add = add
        self._residuals: dict[int, T] = {}
        self._sums: dict[Span, T] = {}
        self._started: dict[Span, tuple[T, T]] = {}  # what a run adds, and the start of the stream plus that

    def block(self, step: int, name: str, compute: Callable[[], T]) -> T:
        """What one block adds at a step: computed if it is due, else the rule."""
        block = self._plan.places[name]
        if block in self._plan.due(step):
            self._residuals[block] = compute()
        return self._residuals[block]

    def computed(self, operation: Compute, residual: T) -> None:
        """Keep what was computed, if a later step adds it again; what the block added before is gone."""
        self._residuals.pop(operation.block, None)
        if operation.keep:
            self._residuals[operation.block] = residual

    def run(self, operation: AddRun) -> T:
        """What a run of skipped neighbours adds, as one sum."""
        if operation.parts:
            self._sums[operation.run] = self._add([self._at_hand(part) for part in operation.parts])
        return self._at_hand(operation.run)

    def run_onto(self, operation: AddRun, start: T) -> T:
        """The start of the stream with such a run on top; the same sum as long as the run adds the same."""
        added = self.run(operation)
        if operation.run not in self._started or self._started[operation.run][0] is not added:
            self._started[operation.run] = added, self._add([start, added])
        return self._started[operation.run][1]

    def end_step(self, step: int) -> None:
        """Let go of the sums that no later step uses."""
        for run in self._plan.stale[step]:
            del self._sums[run]
            self._started.pop(run, None)

    def _at_hand(self, run: Span) -> T:
        return self._residuals[run[0]] if run[0] == run[1] else self._sums[run]
