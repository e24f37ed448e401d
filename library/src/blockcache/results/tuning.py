"""What tuning found: points of loss against time, the front of them, and the one that was chosen, with its evidence.

Frozen values with a JSON file format. Knows nothing of torch or of how points are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any

from blockcache.errors import BlockcacheError
from blockcache.files import NEWER, Count, Format, Limit, Positive, keys_of
from blockcache.measure.distance import Distances
from blockcache.measure.statistics import Estimate
from blockcache.results.losses import Prediction
from blockcache.results.rollouts import OfPolicy, PolicyOrigin

MARGIN = 0.5
"""A prediction scatters, so that half of the loss that a user allows is kept in hand until rollouts tell."""
NEAR = 1.1
"""Times within this factor are not told apart: a machine does other things as well."""


class TuningError(BlockcacheError):
    """A tuning that cannot be done as asked."""


@dataclass(frozen=True)
class Goal:
    """What is wanted: the least loss within a deadline, or the least time within a loss. Exactly one of them.

    Args:
        deadline_ms: That 95 of 100 chunks must keep.
        loss: Of the score that may be lost at most.
        spread: How much of the actions' spread must be kept, as a share: (lowest, highest); None leaves it free.
        rollouts: Whether rollouts follow: a prediction then says only what is worth them, and its bound decides nothing.
    """

    deadline_ms: float | None = None
    loss: float | None = None
    spread: tuple[float, float] | None = None
    rollouts: bool = field(default=False, metadata={NEWER: True})

    def __post_init__(self) -> None:
        if (self.deadline_ms is None) == (self.loss is None):
            raise TuningError("tuning needs either a deadline or a loss to allow, such as deadline_ms=25 or loss=0.03")
        for name, value in (("deadline", self.deadline_ms), ("loss", self.loss)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise TuningError(f"the {name} must be a number above 0, got {value}")

    def judged_ms(self, point: Point) -> float:
        """The milliseconds of a point that count: what 95 of 100 chunks keep for a deadline, else the median."""
        return point.p50_ms if self.deadline_ms is None else point.p95_ms

    def text(self) -> str:
        if self.deadline_ms is not None:
            return f"within {self.deadline_ms:g} ms"
        return f"for a loss of at most {self.loss:g}"

    def order(self, point: Point) -> tuple[float, ...]:
        """Points in the order in which they are wanted: those that meet the goal first, the nearest miss after them."""
        miss = self.miss(point)
        if self.deadline_ms is not None:
            return (miss, round(point.expected_loss, 3), point.cost_ms)
        return (miss, point.cost_ms, point.expected_loss)

    def miss(self, point: Point) -> float:
        """By how much a point misses the goal, in milliseconds or in score; 0 if it meets it. What counts is the loss that
        is not ruled out: by the interval of its rollouts, else by its bound, where there is one and no rollouts follow."""
        if self.spread is not None and not self.spread[0] <= point.distances.spread.mean <= self.spread[1]:
            return math.inf
        if self.deadline_ms is not None:
            return max(0.0, self.judged_ms(point) - self.deadline_ms)
        assert self.loss is not None
        if point.rollouts is not None:
            return max(0.0, -point.rollouts.low - self.loss)
        if point.bound is not None and not self.rollouts:
            return max(0.0, point.bound - self.loss)
        return max(0.0, point.loss - MARGIN * self.loss)


@dataclass(frozen=True)
class Point:
    """One method at one number of threads.

    method          by name
    engine, threads what ran it
    p50_ms, p95_ms  one call, batch 1, timed in turn with the other points
    flops           of one generation
    chunks          of how many the distances are
    distances       of its actions from the policy's own
    loss            predicted; see `results.losses`
    bound           it loses at most this with 90 % certainty, 1 if nothing can be promised; None where it was not kept, as
                    in files of before for what was rolled out
    rollouts        paired difference of the score on tuning seeds, where there were rollouts
    calls           that there are for as many actions as the policy executes of a chunk: above 1 where it replans
    """

    method: str
    engine: str
    threads: Count
    p50_ms: Positive
    p95_ms: Positive
    flops: Count
    chunks: Count
    distances: Distances
    loss: float
    rollouts: Estimate | None = None
    bound: float | None = field(default=None, metadata={NEWER: True})
    calls: Annotated[float, Limit(1, 100_000)] = field(default=1, metadata={NEWER: True})

    @property
    def cost_ms(self) -> float:
        """All calls for as many actions as the policy executes of a chunk."""
        return self.calls * self.p50_ms

    @property
    def promise(self) -> str:
        """What is known for certain of the predicted loss."""
        if self.bound is None:
            return "its bound was not kept"
        return "nothing is promised" if self.bound >= 1 else Prediction(self.loss, self.bound).words

    @property
    def expected_loss(self) -> float:
        """As rolled out, where it was; otherwise as predicted."""
        return self.loss if self.rollouts is None else -self.rollouts.mean


def front(points: Iterable[Point], ms: Callable[[Point], float] = attrgetter("p50_ms")) -> tuple[Point, ...]:
    """The points that no other beats in both time and loss, the fastest first.

    Args:
        points: Any of them.
        ms: Which of a point's times counts, for each of its calls.
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.calls * ms(point), point.expected_loss)):
        if not kept or point.expected_loss < kept[-1].expected_loss:
            kept.append(point)
    return tuple(kept)


def promising(points: Sequence[Point], goal: Goal, count: int) -> tuple[Point, ...]:
    """The points that are worth a longer trial: the front around the goal first, then what the goal wants next.

    Args:
        points: Those that were tried.
        goal: What is asked for.
        count: How many are wanted, at most.
    """
    on_front = sorted(front(points), key=goal.order)
    rest = sorted((point for point in points if point not in on_front), key=goal.order)
    return tuple((on_front + rest)[:count])


def choose(points: Sequence[Point], goal: Goal) -> Point:
    """What the goal wants most. For a loss to allow, that is the fastest, or what loses less of those that are as good as
    equally fast.

    Args:
        points: Those to choose from, at least one.
        goal: What is asked for.
    """
    first = min(points, key=goal.order)
    if goal.deadline_ms is not None:
        return first
    near = [point for point in points if goal.miss(point) <= goal.miss(first) and point.cost_ms <= NEAR * first.cost_ms]
    return min(near, key=lambda point: (point.expected_loss, point.cost_ms))


@dataclass(frozen=True)
class Tuning(OfPolicy):
    """The outcome of one tuning.

    Args:
        policy: Where it came from, and its fingerprint.
        goal: What was wanted.
        setting: Seeds, observations, minutes and so on: what else the figures depend on.
        machine: What the times were measured on.
        plain_ms: One chunk of the plain policy, timed in turn with the points.
        points: Those of a long trial, and the rest of the front by its first, short one (`chunks` tells which).
        chosen: The name of the method that was chosen, and its threads.
        fresh: Its paired difference on seeds that played no part in the choice, where there were rollouts.
        notes: What a reader should know, such as what there was no time for.
    """

    policy: PolicyOrigin
    goal: Goal
    setting: Mapping[str, Any]
    machine: Mapping[str, Any]
    plain_ms: Positive
    points: tuple[Point, ...]
    chosen: Point
    fresh: Estimate | None
    notes: tuple[str, ...]

    @property
    def met(self) -> bool:
        return self.goal.miss(self.chosen) == 0

    @property
    def front(self) -> tuple[Point, ...]:
        """By the time that the goal judges."""
        return front(self.points, self.goal.judged_ms)

    def content(self) -> dict[str, Any]:
        return {**super().content(), "chosen": _label(self.chosen)}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Tuning:
        chosen = [point for point in content["points"] if _label(point) == content["chosen"]]
        if len(chosen) != 1:
            raise ValueError(f"it has {len(chosen)} points called {content['chosen']!r}, not one")
        return cls(**{**content, "chosen": chosen[0]})


Tuning.FORMAT = Format(
    "blockcache.tuning", "tuning", {**keys_of(Tuning), "chosen": str}, again="run 'blockcache tune' again"
)


def _label(point: Point) -> str:
    return f"{point.method} @ {point.threads}"
