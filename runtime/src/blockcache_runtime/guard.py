"""Whether an observation is like those that a policy was tuned on. Knows nothing of policies, engines and torch.

Two distances are taken, both in units of what held-out observations of the calibration reached: that of the newest moment,
and that of what changed since the moment before. An observation beyond 1 in either is *outside*. One whose newest moment was
seen before, number by number, is *repeated*: a sensor stands still. Frames are looked at as small pictures.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from blockcache_runtime.checks import Array
from blockcache_runtime.errors import ContentError, ObservationError
from blockcache_runtime.fields import Limit, Name

ACTIONS = COUNT, WARN, FULL = "count", "warn", "full"
"""What is done about an observation that is outside: it is counted; a line is logged, too; it is answered in full precision,
too."""
SIDE = 8  # of the small pictures that frames are looked at as
RECENT = 64  # newest moments that are remembered of whoever asks
_logger = logging.getLogger("blockcache.guard")
Positive = Annotated[float, Limit(1e-12, 1e12)]


@dataclass(frozen=True)
class Cloud:
    """Where numbers lay: a distance that is 1 where held-out ones ended.

    Args:
        mean: (F,) the mean of each number.
        scale: (F,) the spread of each number, by which its distance from the mean is divided.
        directions: (R, F) unit vectors along which the numbers, so scaled, varied most.
        spread: (R,) how much they varied along each of these.
        rest: How much they varied in any other direction.
        limit: What the distance is divided by.
    """

    mean: tuple[float, ...]
    scale: tuple[Positive, ...]
    directions: tuple[tuple[float, ...], ...]
    spread: tuple[Positive, ...]
    rest: Positive
    limit: Positive

    def __post_init__(self) -> None:
        size = len(self.mean)
        lengths = {len(self.scale), *map(len, self.directions)}
        if not size or lengths != {size} or len(self.spread) != len(self.directions):
            raise ContentError("the numbers of a guard do not belong together")

    def distances(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """(B, F) -> (B,)."""
        mean, scale, directions, weights, others = self._arrays
        apart = (values - mean) / scale
        along = apart @ directions
        squares = (along * along) @ weights + (apart * apart) @ others
        found: npt.NDArray[np.float64] = np.sqrt(np.maximum(squares, 0.0)) / self.limit
        return found

    @cached_property
    def _arrays(self) -> tuple[npt.NDArray[np.float64], ...]:
        """So that the squares are few products: those in all directions, as if each varied as the rest, and corrections."""
        size = len(self.mean)
        directions = np.reshape(np.array(self.directions, dtype=np.float64), (-1, size)).T
        weights = (np.array(self.spread, dtype=np.float64) ** -2.0 - self.rest**-2) / size
        others = np.full(size, self.rest**-2 / size)
        return np.array(self.mean), np.array(self.scale), directions, weights, others


@dataclass(frozen=True, eq=False)
class Look:
    """Observations as a guard sees them.

    Args:
        newest: (B, F) the numbers of the newest moment.
        change: (B, F) what changed since the moment before.
        parts: The newest moment as a whole, and of each camera; (B, ...) each.
    """

    newest: npt.NDArray[np.float64]
    change: npt.NDArray[np.float64]
    parts: tuple[npt.NDArray[np.float64], ...]


@dataclass(frozen=True)
class Guard:
    """What a policy's observations looked like when it was tuned, and what to do about one that does not.

    Args:
        action: One of `ACTIONS`.
        inputs: What is looked at: shapes by name, the moments first.
        cameras: Which of these are frames.
        observations: How many it was fitted to.
        newest: Where the numbers of the newest moment lay.
        motion: Where the changes since the moment before lay; None for a policy that looks at one moment.
    """

    action: str
    inputs: Annotated[dict[Name, Annotated[tuple[Annotated[int, Limit(1, 2**24)], ...], Limit(2, 8)]], Limit(1, 100)]
    cameras: tuple[Name, ...]
    observations: Annotated[int, Limit(1)]
    newest: Cloud
    motion: Cloud | None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ContentError(f"a guard is one of {', '.join(ACTIONS)}, got {self.action!r}")
        shapes = {name: self.inputs.get(name, ()) for name in self.cameras}
        odd = [name for name, shape in shapes.items() if len(shape) != 4]
        moments = {shape[0] for shape in self.inputs.values()}
        if odd or len(moments) != 1 or (self.motion is not None) != (moments != {1}):
            raise ContentError("a guard looks at inputs that all have the same moments, and at frames among them")
        numbers = sum(_numbers(shape, name in self.cameras) for name, shape in self.inputs.items())
        if {len(cloud.mean) for cloud in (self.newest, self.motion) if cloud is not None} != {numbers}:
            raise ContentError(f"a guard of these inputs looks at {numbers} numbers, and has others")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_inputs(self, inputs: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse to look at a policy that observes other things.

        Args:
            inputs: The policy's: shapes by name, without the batch.
        """
        for name, shape in self.inputs.items():
            if name not in inputs or tuple(inputs[name]) != tuple(shape):
                found = f"{tuple(inputs[name])}" if name in inputs else f"none, only {', '.join(inputs)}"
                raise ObservationError(
                    f"this guard looks at {name!r} of shape {tuple(shape)}, and the policy has {found}: it was fitted to "
                    "another policy's observations; fit it again"
                )

    def scores(self, seen: Look) -> npt.NDArray[np.float64]:
        """How far observations are from those of the calibration, (B,); beyond 1 they are outside."""
        found = self.newest.distances(seen.newest)
        return found if self.motion is None else np.maximum(found, self.motion.distances(seen.change))


def look(observed: Mapping[str, npt.NDArray[Any]], names: Iterable[str], cameras: Collection[str]) -> Look:
    """What a guard sees of observations.

    Args:
        observed: (B, moments, ...) by name, in robot units; frames from 0 to 1.
        names: Which of them it looks at.
        cameras: Which of these are frames.
    """
    newest, change, pictures = [], [], []
    for name in names:
        moments = observed[name][:, -2:]
        if name in cameras:
            moments = _small(moments)
        rows = moments.reshape(*moments.shape[:2], -1).astype(np.float64)
        newest.append(rows[:, -1])
        change.append(rows[:, -1] - rows[:, 0])
        if name in cameras:
            pictures.append(newest[-1])
    whole = _joined(newest)
    return Look(whole, _joined(change), (whole, *pictures))


def _joined(rows: list[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)


def _numbers(shape: tuple[int, ...], camera: bool) -> int:
    sides = (min(SIDE, size) for size in shape[2:]) if camera else shape[2:]
    return prod((*shape[1:2], *sides))


def _small(frames: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(..., H, W) -> (..., 8, 8), each number the mean of its part of the frame."""
    for axis in (-2, -1):
        size = frames.shape[axis]
        parts = np.linspace(0, size, min(SIDE, size), endpoint=False).astype(np.intp)
        counts = np.diff([*parts, size]).astype(np.float32)
        frames = np.add.reduceat(frames, parts, axis=axis) / (counts[:, None] if axis == -2 else counts)
    return frames


@dataclass(frozen=True, eq=False)
class Judgement:
    """What a guard found of a batch of observations.

    Args:
        scores: (B,) how far each is from those of the calibration; beyond 1 it is outside.
        repeated: (B,) whether the newest moment was seen before, or a camera's newest frame.
    """

    scores: npt.NDArray[np.float64]
    repeated: npt.NDArray[np.bool_]

    @property
    def outside(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.scores > 1)

    @property
    def counts(self) -> dict[str, int]:
        """Observations that were judged, those that were outside, and those that were repeated."""
        return {"judged": len(self.scores), "outside": int(self.outside.sum()), "repeated": int(self.repeated.sum())}

    def of(self, place: int) -> Judgement:
        """Of one of the batch."""
        return Judgement(self.scores[place : place + 1], self.repeated[place : place + 1])

    def arrays(self) -> dict[str, Array]:
        """For the answer of a policy."""
        kept = {"guard_score": self.scores, "guard_repeated": self.repeated}
        return {name: value.astype(np.float32) for name, value in kept.items()}


class GuardWatch:
    """A guard at work: it judges, counts and warns. Several threads may ask at once."""

    def __init__(self, guard: Guard) -> None:
        """Begin with nothing counted.

        Args:
            guard: What to judge by.
        """
        self.guard = guard
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(judged=0, outside=0, repeated=0)
        self._recent: dict[bytes, None] = {}  # in the order in which they were first seen

    @property
    def counts(self) -> dict[str, int]:
        """See `Judgement.counts`, of all."""
        with self._lock:
            return dict(self._counts)

    def judge(
        self, observed: Mapping[str, npt.NDArray[Any]], recent: Sequence[dict[bytes, None]] | None = None
    ) -> Judgement:
        """Judge a batch, and count.

        Args:
            observed: As `look` takes it.
            recent: For each of the batch, what its robot showed before, to be kept here; without it all are one robot's.
        """
        seen = look(observed, self.guard.inputs, self.guard.cameras)
        scores = self.guard.scores(seen)
        keys = [tuple(row.tobytes() for row in rows) for rows in zip(*seen.parts, strict=True)]
        with self._lock:
            known = [self._recent] * len(keys) if recent is None else recent
            repeated = np.array([any(part in one for part in row) for row, one in zip(keys, known, strict=True)])
            for row, one in zip(keys, known, strict=True):
                one.update(dict.fromkeys(row))
                while len(one) > RECENT * len(seen.parts) + len(keys):
                    del one[next(iter(one))]
            judgement = Judgement(scores, repeated)
            before = self._counts["outside"] + self._counts["repeated"]
            self._counts.update(judgement.counts)
            counts = dict(self._counts)
        # at the first, the second, the fourth: a robot that stays outside does not fill its log
        if self.guard.action != COUNT and (counts["outside"] + counts["repeated"]).bit_length() > before.bit_length():
            _logger.warning("%s", _words(judgement, counts))
        return judgement


def _words(judgement: Judgement, counts: Mapping[str, int]) -> str:
    total = f"so far {counts['outside']} outside and {counts['repeated']} repeated of {counts['judged']}"
    if judgement.outside.any():
        most = float(judgement.scores.max())
        return (
            f"an observation is outside of what the policy was tuned on, {most:.1f} times as far as it may be; {total}"
        )
    return f"an observation is the same as one before: a sensor stands still; {total}"
