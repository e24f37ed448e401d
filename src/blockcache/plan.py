"""The plan: a schedule compiled into a program, step by step, with nothing left to decide.

Each step is a list of operations on the residual stream, in execution order: compute a block and add its residual, or
add a run of neighbouring blocks' cached residuals as one pre-summed tensor. A sum is built when a run is first needed
and used again until one of its members is computed anew. Pure values: knows nothing of torch or of how a block is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from blockcache.errors import ScheduleError
from blockcache.schedule import Schedule


@dataclass(frozen=True)
class Compute:
    """Compute block number `block`, add its residual; `keep` it if a later step adds it again."""

    block: int
    keep: bool


@dataclass(frozen=True)
class AddRun:
    """Add the cached residuals of blocks `first` to `last` (inclusive) as one tensor.

    The tensor was, or now is, summed up at step `built`; whoever executes the plan keeps it until `expires`, the last
    step that adds it.
    """

    first: int
    last: int
    built: int
    expires: int


Operation: TypeAlias = Compute | AddRun


@dataclass(frozen=True)
class Plan:
    """`program[k]` lists the operations of step k."""

    blocks: tuple[str, ...]
    program: tuple[tuple[Operation, ...], ...]

    @property
    def steps(self) -> int:
        return len(self.program)

    def due(self, step: int) -> frozenset[str]:
        """Names of the blocks that are computed at a step."""
        return frozenset(self.blocks[op.block] for op in self.program[step] if isinstance(op, Compute))

    def describe(self) -> str:
        """One line a step: blocks computed by name, runs of cached ones as [first..last] with the step of their sum."""
        return "\n".join(
            f"step {step:3d}: " + " ".join(self._word(op, step) for op in operations)
            for step, operations in enumerate(self.program)
        )

    def _word(self, operation: Operation, step: int) -> str:
        if isinstance(operation, Compute):
            return self.blocks[operation.block]
        names = self.blocks[operation.first], self.blocks[operation.last]
        span = names[0] if operation.first == operation.last else f"{names[0]}..{names[1]}"
        return f"[{span}]" if operation.built == step else f"[{span} of step {operation.built}]"


def compile_plan(schedule: Schedule, blocks: Sequence[str] | None = None) -> Plan:
    """Compile a schedule. `blocks`, if given, must be the schedule's blocks in execution order."""
    names = schedule.blocks if blocks is None else tuple(blocks)
    if names != schedule.blocks:
        raise ScheduleError(
            f"the schedule's {len(schedule.blocks)} blocks are not these {len(names)}, or in another order"
        )
    due = [[step in updates for updates in schedule.update_sets.values()] for step in range(schedule.steps)]
    runs = [_runs(row) for row in due]
    program = [
        tuple(
            AddRun(first, last, _built(due, runs, step, first, last), _expires(due, runs, step, first, last))
            if reused
            else Compute(first, _kept(due, step, first))
            for first, last, reused in runs[step]
        )
        for step in range(schedule.steps)
    ]
    return Plan(names, tuple(program))


def _runs(row: list[bool]) -> list[tuple[int, int, bool]]:
    """(first, last, reused): computed blocks one by one, neighbouring reused ones together."""
    found: list[tuple[int, int, bool]] = []
    for block, computed in enumerate(row):
        if not computed and found and found[-1][2]:
            found[-1] = (found[-1][0], block, True)
        else:
            found.append((block, block, not computed))
    return found


def _kept(due: list[list[bool]], step: int, block: int) -> bool:
    return step + 1 < len(due) and not due[step + 1][block]


def _unchanged(due: list[list[bool]], step: int, first: int, last: int) -> bool:
    return not any(due[step][first : last + 1])


def _built(due: list[list[bool]], runs: list[list[tuple[int, int, bool]]], step: int, first: int, last: int) -> int:
    """The earliest step since the members' last change at which just this run was added."""
    built = step
    for earlier in range(step - 1, -1, -1):
        if not _unchanged(due, earlier, first, last):
            break
        if (first, last, True) in runs[earlier]:
            built = earlier
    return built


def _expires(due: list[list[bool]], runs: list[list[tuple[int, int, bool]]], step: int, first: int, last: int) -> int:
    expires = step
    for later in range(step + 1, len(due)):
        if not _unchanged(due, later, first, last):
            break
        if (first, last, True) in runs[later]:
            expires = later
    return expires
