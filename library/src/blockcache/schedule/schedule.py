"""The Schedule: at which denoising steps each block is computed, and the FLOPs of that. A frozen value with a JSON file.

Steps count in execution order, 0 is the first denoising step (most noise). Between its update steps a block's last
output is used again. The format is specified in docs/file-formats.md. Knows nothing of torch or of solvers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from blockcache.block import Block
from blockcache.errors import BlockcacheError, ContentError, ScheduleError, short
from blockcache.files import Format, PathLike, read
from blockcache.fingerprint import Fingerprint

FORMAT = Format(
    "blockcache.schedule", "schedule", {"steps": Any, "updates": dict, "fingerprint": Fingerprint, "origin": dict}
)
MOST_STEPS, MOST_BLOCKS, LONGEST_NAME = 10_000, 10_000, 200


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


@dataclass(frozen=True)
class Schedule:
    """Update steps per block, in execution order of the blocks; checked when it is made.

    Args:
        steps: Denoising steps of one generation, K.
        updates: For each block, in execution order, the steps at which it is computed; the first is always 0.
        fingerprint: What the schedule fits; its blocks and steps are always those of the schedule itself.
        origin: A record of how it came to be, in JSON types.
    """

    static: ClassVar[bool] = True

    steps: int
    updates: Mapping[str, Sequence[int]]
    fingerprint: Fingerprint = Fingerprint()
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _is_count(self.steps) or not 1 <= self.steps <= MOST_STEPS:
            raise ScheduleError(
                f"a schedule needs a positive whole number of steps, {MOST_STEPS:,} at most, got {short(self.steps)}"
            )
        if not self.updates:
            raise ScheduleError("a schedule needs at least one block, got none")
        if len(self.updates) > MOST_BLOCKS:
            raise ScheduleError(f"a schedule has {MOST_BLOCKS:,} blocks at most, got {len(self.updates):,}")
        for name in self.updates:
            if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
                raise ScheduleError(
                    f"a block's name must be a text that is not empty, {LONGEST_NAME} characters at most, got {short(name)}"
                )
        checked = {name: check_updates(name, steps, self.steps) for name, steps in self.updates.items()}
        own = {"blocks": tuple(checked), "steps": self.steps}
        for name, value in own.items():
            bound = getattr(self.fingerprint, name)
            if bound is not None and bound != value:
                raise ScheduleError(f"the schedule's own {name} differ from those of its fingerprint")
        object.__setattr__(self, "updates", MappingProxyType(checked))
        object.__setattr__(self, "fingerprint", replace(self.fingerprint, blocks=tuple(checked), steps=self.steps))
        object.__setattr__(self, "origin", MappingProxyType(checked_origin(self.origin, ScheduleError)))

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy cannot be copied or sent to a worker by itself
        return Schedule, (self.steps, dict(self.updates), self.fingerprint, dict(self.origin))

    @cached_property
    def update_sets(self) -> Mapping[str, frozenset[int]]:
        return {name: frozenset(steps) for name, steps in self.updates.items()}

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(self.updates)

    @property
    def computed(self) -> int:
        """Block computations in one generation."""
        return sum(len(steps) for steps in self.updates.values())

    @property
    def reused_share(self) -> float:
        """The share of all block x step cells that are not computed."""
        return 1.0 - self.computed / (self.steps * len(self.updates))

    def describe(self) -> dict[str, Any]:
        """All that decides the actions, in JSON types."""
        return {"updates": {name: list(steps) for name, steps in self.updates.items()}}

    def flops(self, blocks: Sequence[Block], reused: float = 0.0) -> int:
        """FLOPs of the blocks computed in one generation.

        Args:
            blocks: The policy's, with their costs.
            reused: Of no concern here: a schedule knows already what it reuses.
        """
        if self.blocks != tuple(block.name for block in blocks):
            raise ScheduleError(f"the schedule's {len(self.blocks)} blocks are not the {len(blocks)} of this shape")
        return sum(block.cost * len(self.updates[block.name]) for block in blocks)

    @classmethod
    def every_step(cls, steps: int, blocks: Sequence[str], fingerprint: Fingerprint = Fingerprint()) -> Schedule:
        """Nothing is ever reused: full precision, written as a schedule.

        Args:
            steps: Denoising steps of one generation.
            blocks: Names in execution order.
            fingerprint: What the schedule fits.
        """
        return cls(steps, {name: range(steps) for name in blocks}, fingerprint, {"method": "full"})

    def save(self, path: PathLike) -> None:
        """Write the JSON file, atomically.

        Args:
            path: The file.
        """
        bound = {"fingerprint": self.fingerprint.to_dict(), "origin": dict(self.origin)}
        FORMAT.save(path, {"steps": self.steps, **self.describe(), **bound})

    @classmethod
    def load(cls, path: PathLike) -> Schedule:
        """Read a JSON file; unknown versions and keys are refused.

        Args:
            path: The file, gzipped or not.
        """
        value = FORMAT.load(path)
        with FORMAT.reading(path):
            return cls(**value)

    @classmethod
    def load_beside(cls, path: PathLike) -> Schedule:
        """Read a file that was found beside a policy, not named by a user; bound to no weights, it would fit any policy.

        Args:
            path: The file.
        """
        found = cls.load(path)
        if found.fingerprint.weights is None:
            raise ScheduleError(
                f"{path} was made for no weights in particular, and is not followed unless it is named: "
                f"accelerate(policy, Schedule.load(path)), or 'blockcache export POLICY {path}'; for full precision "
                "accelerate(policy, None), or remove the file"
            )
        return found


def generation_flops(
    blocks: Sequence[Block], every_step: int, steps: int, strategy: Strategy | None = None, reused: float = 0.0
) -> int:
    """FLOPs of one whole generation.

    Args:
        blocks: In execution order, with their costs.
        every_step: What a step costs outside the blocks.
        steps: How many there are.
        strategy: When blocks are computed; without one every block is, at every step.
        reused: The share of block computations that was saved, as measured; for strategies that decide as they run.
    """
    if strategy is None:
        return steps * (every_step + sum(block.cost for block in blocks))
    if strategy.steps != steps:
        raise ScheduleError(f"the schedule is for {strategy.steps} steps, the generation has {steps}")
    return steps * every_step + strategy.flops(blocks, reused)


def checked_origin(origin: Mapping[str, Any], error: type[BlockcacheError]) -> dict[str, Any]:
    """How a value came to be, as it will stand in its file; otherwise `error`: what no file can hold has no origin.

    Args:
        origin: The record, by name.
        error: The class of what is raised.
    """
    try:
        return dict(read(Any, dict(origin), "origin"))
    except (ContentError, TypeError, ValueError) as problem:
        raise error(
            f"the origin is a record that a file can hold, of texts and plain finite numbers: {problem}"
        ) from problem


def check_updates(name: str, updates: Sequence[int], steps: int) -> tuple[int, ...]:
    """The update steps of one block as a tuple, or a sentence saying what is wrong with them."""
    if not isinstance(updates, Sequence) or isinstance(updates, str | bytes):
        raise ScheduleError(f"{name}: update steps must be a list of whole numbers, got {short(updates)}")
    for step in updates:
        if not _is_count(step):
            raise ScheduleError(f"{name}: update steps must be whole numbers, got {short(step)}")
    if not updates or updates[0] != 0:
        raise ScheduleError(f"{name}: the first update step must be 0, got {updates[0] if updates else 'no steps'}")
    for before, after in pairwise(updates):
        if after == before:
            raise ScheduleError(f"{name}: update step {after} appears twice")
        if after < before:
            raise ScheduleError(f"{name}: update steps must rise, got {after} after {before}")
    if updates[-1] >= steps:
        raise ScheduleError(
            f"{name}: update step {updates[-1]} is out of range, the last of {steps} steps is {steps - 1}"
        )
    return tuple(updates)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
