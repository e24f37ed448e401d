"""The plan: a schedule compiled into a program, step by step, with nothing left to decide.

Each step is a list of operations on the residual stream, in execution order: compute a block and add its residual, or
add a run of neighbouring blocks' cached residuals as one pre-summed tensor. A sum is built when a run is first needed,
out of as few sums and single residuals as are at hand, and used again until one of its members is computed anew.

`Reuse` follows a plan through one generation. The rule: a block that is skipped adds the residual of its last update again,
unchanged; a gate, where a model has one, is applied after that, with its present value. Every engine and every analysis
reads the rule from there. Knows nothing of torch, of what a residual is or of how a block is run: only sums are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar

from blockcache.errors import ScheduleError
from blockcache.schedule.schedule import Schedule

T = TypeVar("T")
Span: TypeAlias = tuple[int, int]
"""First and last block (inclusive) of a run of neighbours."""


@dataclass(frozen=True)
class Compute:
    """Compute block number `block` and add its residual; `keep` it if a later step adds it again."""

    block: int
    keep: bool


@dataclass(frozen=True)
class AddRun:
    """Add the cached residuals of a run as one tensor: the sum of `parts` if there are any, else what is at hand.

    At hand is a single block's residual, or the sum of a run that was built before. Parts are such things too.
    """

    run: Span
    parts: tuple[Span, ...]


Operation: TypeAlias = Compute | AddRun


@dataclass(frozen=True)
class Plan:
    """`program[k]` lists the operations of step k, `stale[k]` the sums that nothing uses after it."""

    blocks: tuple[str, ...]
    program: tuple[tuple[Operation, ...], ...]
    stale: tuple[tuple[Span, ...], ...]

    @property
    def steps(self) -> int:
        return len(self.program)

    @property
    def computes_everything(self) -> bool:
        """Whether this is full precision: every block at every step."""
        return all(len(self.due(step)) == len(self.blocks) for step in range(self.steps))

    @cached_property
    def places(self) -> dict[str, int]:
        """Each block's place in the order of execution."""
        return {name: place for place, name in enumerate(self.blocks)}

    def due(self, step: int) -> frozenset[int]:
        """Places of the blocks that are computed at a step."""
        return self._due[step]

    @cached_property
    def _due(self) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(op.block for op in row if isinstance(op, Compute)) for row in self.program)

    def describe(self) -> str:
        """One line a step: computed blocks by name, runs of cached ones in brackets, `=` where a sum is used again."""
        return "\n".join(
            f"step {step:3d}: " + " ".join(map(self._word, operations)) for step, operations in enumerate(self.program)
        )

    def _word(self, operation: Operation) -> str:
        if isinstance(operation, Compute):
            return self.blocks[operation.block]
        first, last = operation.run
        span = self.blocks[first] if first == last else f"{self.blocks[first]}..{self.blocks[last]}"
        return f"[{span}]" if operation.parts or first == last else f"[= {span}]"


class Reuse(Generic[T]):
    """The residuals of one generation: what a block adds when it is not computed, what is kept for that and when it dies.

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


def compile_plan(schedule: Schedule, blocks: Sequence[str] | None = None, *, sums: bool = True) -> Plan:
    """Compile a schedule.

    Args:
        schedule: What to compile.
        blocks: If given, they must be the schedule's blocks in execution order.
        sums: Whether neighbouring skipped blocks are added as one sum; where each has a gate of its own, that means nothing.
    """
    names = schedule.blocks if blocks is None else tuple(blocks)
    if names != schedule.blocks:
        raise ScheduleError(
            f"the schedule's {len(schedule.blocks)} blocks are not these {len(names)}, or in another order"
        )
    due = [[step in updates for updates in schedule.update_sets.values()] for step in range(schedule.steps)]
    program: list[tuple[Operation, ...]] = []
    known: set[Span] = set()  # sums at hand and still true
    for step, row in enumerate(due):
        operations: list[Operation] = []
        for first, last, computed in _pieces(row, sums):
            if computed:
                known = {run for run in known if not run[0] <= first <= run[1]}
                operations.append(Compute(first, keep=step + 1 < schedule.steps and not due[step + 1][first]))
            else:
                run = (first, last)
                at_hand = first == last or run in known
                operations.append(AddRun(run, () if at_hand else _fewest_parts(run, known)))
                known.add(run)
        program.append(tuple(operations))
    return Plan(names, tuple(program), _stale(program))


def _pieces(row: list[bool], sums: bool) -> list[tuple[int, int, bool]]:
    """(first, last, computed): computed blocks one by one, neighbouring cached ones together if they may be summed."""
    found: list[tuple[int, int, bool]] = []
    for block, computed in enumerate(row):
        if sums and not computed and found and not found[-1][2]:
            found[-1] = (found[-1][0], block, False)
        else:
            found.append((block, block, computed))
    return found


def _fewest_parts(run: Span, sums: set[Span]) -> tuple[Span, ...]:
    """Cover a run with as few sums at hand and single blocks as possible."""
    first, last = run
    best: dict[int, tuple[Span, ...]] = {first: ()}  # covered up to, but not including
    for start in range(first, last + 1):
        options = [(start, start), *(known for known in sums if known[0] == start and known[1] <= last)]
        for option in options:
            parts = (*best[start], option)
            if option[1] + 1 not in best or len(parts) < len(best[option[1] + 1]):
                best[option[1] + 1] = parts
    return best[last + 1]


def _stale(program: list[tuple[Operation, ...]]) -> tuple[tuple[Span, ...], ...]:
    """For each step, the runs whose sum was used there for the last time before it is built anew, or ever."""
    stale: list[set[Span]] = [set() for _ in program]
    needed: set[Span] = set()  # going backwards: sums that a later step uses as they are
    for step in range(len(program) - 1, -1, -1):
        for operation in reversed(program[step]):
            if isinstance(operation, Compute):
                continue
            for run in (operation.run, *operation.parts):
                if run not in needed and run[0] < run[1]:
                    needed.add(run)
                    stale[step].add(run)
            if operation.parts:
                needed.discard(operation.run)
    return tuple(tuple(sorted(runs)) for runs in stale)
