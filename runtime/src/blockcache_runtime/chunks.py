"""Which action of which chunk is due at a tick of the control loop, and when the next chunk is asked for.

Ticks count at a fixed rate. A chunk is drawn from the observation of the tick at which it is asked for, and arrives some
ticks later. Asynchronous: its action i is meant for i ticks after the request, so what is late is skipped, and until it
arrives the old chunk goes on. Stop and think: the robot holds its last action until the chunk arrives, and then executes it
from its first action. Knows no thread, no clock and no policy: a player gives it real ticks, a rollout simulated ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from blockcache_runtime.checks import read_array
from blockcache_runtime.errors import EngineError, ObservationError, short

Array = npt.NDArray[Any]
REMEMBERED = 8
"""Delays that the next one is estimated from."""
TOLD = PREVIOUS_CHUNK, LATENCY, EXECUTION_HORIZON = "rtc_prev_action_chunk", "rtc_latency", "rtc_execution_horizon"
"""Inputs of an export that can be told of the chunk before: actions in robot units (B, n, A), `delay` and `overlap` (B,)."""


@dataclass(frozen=True, eq=False)
class Previous:
    """What a new chunk is told of the one before it, so that it goes on where that one ends (real-time chunking).

    Args:
        actions: (n, A), or (B, n, A) for a batch, in robot units; the first is due when the new chunk is asked for.
        delay: How many of them will have been executed when the new chunk arrives: it begins with exactly these. One number,
            or one for each of the batch.
        overlap: Up to which action the old chunk pulls the new one, less and less; `delay` or less for no pull behind it.
    """

    actions: Array
    delay: Any
    overlap: Any = 0

    def inputs(self, batch: int, actions: int, size: int) -> dict[str, Array]:
        """What a graph or an engine takes, float32, under the names that exports use.

        Args:
            batch: Chunks that are made at once.
            actions: Of a new chunk, from the one that is due when it is asked for.
            size: Numbers of an action.
        """
        known = read_array(self.actions, "the previous actions")
        alike = known.ndim == 2 or (known.ndim == 3 and len(known) == batch)
        if not alike or known.shape[-1] != size or not known.shape[-2]:
            raise ObservationError(
                f"the previous actions have shape {known.shape}, expected (n, {size}) or ({batch}, n, {size}), n >= 1"
            )
        known = np.broadcast_to(known, (batch, *known.shape[-2:]))[:, :actions]
        count = known.shape[1]
        try:
            delay, overlap = (np.broadcast_to(np.float32(value), (batch,)) for value in (self.delay, self.overlap))
        except (TypeError, ValueError) as error:
            raise ObservationError(f"delay and overlap are numbers, or one for each of {batch} chunks") from error
        if not (np.isfinite(delay) & np.isfinite(overlap) & (delay >= 0)).all():
            raise ObservationError(
                f"delay and overlap are 0 or more, got {short(self.delay)} and {short(self.overlap)}"
            )
        delay = np.minimum(delay, count)
        return {
            PREVIOUS_CHUNK: np.concatenate([known, np.repeat(known[:, -1:], actions - count, axis=1)], axis=1),
            LATENCY: delay,
            EXECUTION_HORIZON: np.clip(overlap, delay, count),
        }


def prefix_weights(delay: Array, overlap: Array, count: int) -> Array:
    """1 before `delay`, then falling by equal steps to 0 at `overlap`, which is not below `delay`.

    Args:
        delay: Actions that the new chunk begins with unchanged; one number, or one for each chunk (B,).
        overlap: The action at which the weight has fallen to 0; one number, or (B,).
        count: How many actions are weighted.
    """
    place = np.arange(count, dtype=np.float32)
    delay, overlap = np.asarray(delay)[..., None], np.asarray(overlap)[..., None]
    weights: Array = np.clip((overlap - place) / (overlap - delay + 1), 0, 1).astype(np.float32)
    return weights


@dataclass
class Counters:
    """What happened since the beginning of an episode.

    Args:
        ticks: Actions that were asked for.
        waiting: Ticks before the first chunk arrived, when there was nothing to do.
        held: Ticks at which the last action was repeated, since no chunk had one.
        stale: Actions, held ones too, from before the newest observation that a chunk was asked for with.
        chunks: Chunks that arrived.
        missed: Chunks that arrived after the old one had run out, the first one aside.
        skipped: Actions of arriving chunks whose time had passed.
        seams: Changes from one chunk to the next.
    """

    ticks: int = 0
    waiting: int = 0
    held: int = 0
    stale: int = 0
    chunks: int = 0
    missed: int = 0
    skipped: int = 0
    seams: int = 0


@dataclass(frozen=True, eq=False)
class Due:
    """What a robot does at a tick: an action (A,), or None before there is any; held: the last one again; seam: the first
    action of another chunk."""

    action: Array | None
    held: bool = False
    seam: bool = False


class Watcher(Protocol):
    """Is told what a control loop sees, plans and does, by the thread of the loop: it must be quick."""

    def observed(self, tick: int, observation: Any) -> None:
        """What was seen before the action of this tick, as `History.push` takes it."""

    def planned(self, begin: int, arrived: int, actions: Array, figures: Mapping[str, float]) -> None:
        """A chunk arrived: its actions (n, A), the first of them for the tick `begin`; and what else is known of it, such as
        `latency_ms`."""

    def acted(self, tick: int, due: Due) -> None:
        """What the robot does at this tick."""


class ChunkTimeline:
    """At each tick: `request` if `wants_chunk`, `arrive` if a chunk has come, then `act`."""

    def __init__(
        self,
        replan: int,
        *,
        stop: bool = False,
        delay: int | None = None,
        overlap: int = 0,
        watcher: Watcher | None = None,
    ) -> None:
        """Begin an episode.

        Args:
            replan: Ticks from one request to the next, at least; in stop and think, actions executed of each chunk.
            stop: Stop and think instead of asynchronous.
            delay: Ticks from a request to its arrival, where they are known; else estimated from those before.
            overlap: Up to which action an old chunk pulls a new one, see `Previous`.
            watcher: Told of every chunk and action.
        """
        if replan < 1:
            raise EngineError(f"a chunk is asked for every tick at most, got replan={replan}")
        self.replan, self.stop, self.overlap = replan, stop, overlap
        self._known_delay, self._watcher = delay, watcher
        self._delays: deque[int] = deque(maxlen=REMEMBERED)
        self._first_delay: int | None = None
        self.reset()

    def reset(self) -> None:
        """Another episode begins; delays are remembered."""
        self.counters = Counters()
        self._chunk: Array | None = None
        self._begin = 0  # the tick of the chunk's first action
        self._requested: int | None = None
        self._dry = False  # a tick was held since the request
        self._last: Array | None = None
        self._last_begin: int | None = None

    @property
    def delay(self) -> int:
        """Ticks that the next chunk is expected to take: the most of the last few.

        The very first inference is slow as a rule, so it counts only while there is no other, and for `replan` at most.
        """
        if self._known_delay is not None:
            return self._known_delay
        return max(self._delays, default=min(self._first_delay or 0, self.replan))

    def wants_chunk(self, tick: int) -> bool:
        """Whether the next chunk is to be asked for now, with the observation of this tick."""
        if self._requested is not None:
            return False
        return self._chunk is None or tick - self._begin >= min(self.replan, len(self._chunk))

    def request(self, tick: int) -> Previous | None:
        """A chunk is asked for; what it may be told of the one before, if there is anything left of that."""
        if self._requested is not None:
            raise EngineError(f"the chunk of tick {self._requested} has not arrived; one is asked for at a time")
        self._requested, self._dry = tick, False
        left = None if self._chunk is None or self.stop else self._chunk[tick - self._begin :]
        if left is None or not len(left):
            return None
        return Previous(left, min(self.delay, len(left)), min(self.overlap, len(left)))

    def arrive(self, tick: int, actions: Any, figures: Mapping[str, float] | None = None) -> None:
        """The chunk that was asked for is there, (n, A), its first action meant for the tick of the request.

        Args:
            tick: The present one.
            actions: The chunk.
            figures: What a watcher is told of it.
        """
        if self._requested is None:
            raise EngineError("a chunk arrived that nobody asked for; call request first")
        taken, chunk = tick - self._requested, np.array(actions)  # a copy: whose actions these are may change them
        if self._first_delay is None:
            self._first_delay = taken
        else:
            self._delays.append(taken)
        self.counters.missed += self._dry and self._chunk is not None
        self.counters.chunks += 1
        self.counters.skipped += 0 if self.stop else min(taken, len(chunk))
        self._chunk, self._begin = chunk, tick if self.stop else self._requested
        self._requested = None
        if self._watcher is not None:
            self._watcher.planned(self._begin, tick, chunk, figures or {})

    def forget_request(self) -> None:
        """The chunk that was asked for will not come; another one may be asked for."""
        self._requested = None

    def act(self, tick: int) -> Due:
        """What to do at this tick; ticks may be left out, and do not go back."""
        due = self._due(tick)
        if self._watcher is not None:
            self._watcher.acted(tick, due)
        return due

    def _due(self, tick: int) -> Due:
        self.counters.ticks += 1
        place = tick - self._begin
        usable = 0 if self._chunk is None else min(self.replan, len(self._chunk)) if self.stop else len(self._chunk)
        if self._chunk is not None and place < usable:
            self.counters.stale += self._requested is not None
            seam = self._last_begin is not None and self._last_begin != self._begin
            self.counters.seams += seam
            self._last, self._last_begin = self._chunk[place], self._begin
            return Due(self._last, seam=seam)
        self._dry = True
        if self._last is None:
            self.counters.waiting += 1
            return Due(None)
        self.counters.held += 1
        self.counters.stale += 1
        return Due(self._last, held=True)


def check_horizon(actions: int, replan: int, delay: int) -> None:
    """Refuse a chunk that has run out before the next one arrives.

    Args:
        actions: Of a chunk, from the one that is due when it is asked for.
        replan: Ticks from one request to the next.
        delay: Ticks from a request to its arrival.
    """
    period = max(replan, delay)  # the next one is asked for when the last has arrived
    if period + delay > actions:
        most = actions - delay
        hint = f"replan after {most} actions at most, or " if most >= max(1, delay) else ""
        raise EngineError(
            f"the overlap is too short for the delay: a chunk has {actions} actions, and replanning every {replan} with a "
            f"delay of {delay} ticks needs a horizon of {period + delay}; {hint}make the policy faster or the rate lower"
        )
