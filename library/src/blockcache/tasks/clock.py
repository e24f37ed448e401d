"""Rollouts in which time passes while the policy computes: a chunk is drawn from the observation at which it is asked for,
and arrives after its latency. Until then the old chunk goes on, or its last action is held.

Time is simulated, in ticks of the control rate, so that results are reproducible and the times of another machine can be
studied; which action is due at a tick is decided by the runtime's `chunks`, which drives a robot too. The world stands still
until the first action, and the episode's time runs all the same. Knows nothing of policies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from blockcache.errors import TaskError
from blockcache.observations import stacked
from blockcache.tasks.base import Array, Task
from blockcache.tasks.rollout import Episode, Rollout, episodes_of
from blockcache_runtime.chunks import ChunkTimeline, Counters, Previous, Watcher, check_horizon

ActOnClock: TypeAlias = Callable[[Any, Sequence[int], Sequence[int], Previous | None], Array]
"""(observations of some episodes (n, n_obs_steps, ...), their places, the index of the chunk of each, what is known of the
chunks before) -> chunks (n, actions, action_dim), whose first actions are due now."""


@dataclass(frozen=True)
class Clock:
    """How time passes.

    Args:
        rate: Control ticks in a second.
        replan: Ticks from one chunk to the next that is asked for; in stop and think, actions executed of each chunk.
        seconds: Latencies: one for all chunks, several to draw from, or None to measure each call as it is made.
        stop: Stop and think, instead of asynchronous.
        rtc: Whether a chunk is told of the one before it (real-time chunking).
        overlap: With `rtc`: up to which action the old chunk pulls the new one; 0 for what is committed alone.
        hold: Whether a chunk may run out before the next one arrives, its last action held meanwhile; refused otherwise.
    """

    rate: float
    replan: int
    seconds: tuple[float, ...] | None
    stop: bool = False
    rtc: bool = False
    overlap: int = 0
    hold: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise TaskError(f"a clock needs a control rate above 0, got {self.rate}")
        if self.replan < 1 or self.overlap < 0:
            raise TaskError(
                f"a clock needs replan of 1 or more and overlap of 0 or more, got {self.replan}, {self.overlap}"
            )
        if self.seconds is not None and not self.seconds:
            raise TaskError("a clock needs one latency at least, got none")
        for value in self.seconds or ():
            if not 0 <= value < math.inf:
                raise TaskError(f"a latency is a number of seconds, 0 or more, got {value}")
        if self.stop and (self.rtc or self.overlap):
            raise TaskError("whoever stops to think has nothing to tell a chunk of; leave out rtc and overlap, or stop")

    def latency(self, seed: int, chunk: int) -> float:
        """Seconds that a chunk takes, the same whenever it is asked."""
        assert self.seconds is not None
        return self.seconds[int(np.random.default_rng((seed, chunk)).integers(len(self.seconds)))]

    def ticks(self, seconds: float) -> int:
        """Ticks that go by meanwhile: what arrives between two ticks is there at the second."""
        return math.ceil(seconds * self.rate - 1e-9)

    def check(self, actions: int) -> None:
        """Refuse chunks of so few actions that none lasts until the next arrives, even after the shortest latency, unless
        the last one may be held."""
        if self.stop:
            if self.replan > actions:
                raise TaskError(f"a chunk has {actions} actions, so that {self.replan} of each cannot be executed")
        elif self.seconds is not None and not self.hold:
            check_horizon(actions, self.replan, self.ticks(min(self.seconds)))

    def describe(self) -> dict[str, Any]:
        """All of it in JSON types."""
        latency = "live" if self.seconds is None else list(self.seconds)
        mode = "stop and think" if self.stop else "asynchronous"
        about: dict[str, Any] = {"rate": self.rate, "replan": self.replan, "seconds": latency, "mode": mode}
        told = {"rtc": True, "overlap": self.overlap} if self.rtc else {}
        return about | told | ({"hold": True} if self.hold else {})


@dataclass(frozen=True, eq=False)
class ClockedRollout(Rollout):
    """How one episode went on the clock.

    Args:
        counters: What happened at its ticks.
        first_action: Seconds until the first action; None if there was none.
        action_hz: Actions in a second of the episode that were not the last one again.
        seams: Places in `actions` where a chunk follows another.
    """

    counters: Counters
    first_action: float | None
    action_hz: float
    seams: tuple[int, ...]


def clocked_rollout(
    task_factory: Callable[[], Task],
    answer: ActOnClock,
    seeds: Sequence[int],
    clock: Clock,
    *,
    n_obs_steps: int,
    on_step: Callable[[Sequence[Task]], None] | None = None,
    watchers: Mapping[int, Watcher] | None = None,
) -> tuple[ClockedRollout, ...]:
    """Run one episode for each seed on the clock, and return their records in the same order.

    Episodes that ask for a chunk at the same tick are answered as one batch; with live latencies one by one.

    Args:
        task_factory: Makes one simulator; it is called once for each seed.
        answer: Gives chunks.
        seeds: Those of the episodes.
        clock: How time passes.
        n_obs_steps: How many observations `answer` sees of each episode; the first one is repeated at the start.
        on_step: Sees the simulators after the start and after every tick, for videos.
        watchers: By seed, told what is seen, planned and done in that episode.
    """
    with episodes_of(task_factory, seeds, n_obs_steps) as episodes:
        clocked = [_Clocked(episode, clock, (watchers or {}).get(episode.seed)) for episode in episodes]
        tasks = [episode.task for episode in episodes]
        for episode in episodes:
            episode.reset()
        shown = on_step or (lambda tasks: None)
        shown(tasks)
        for tick in range(tasks[0].spec.max_steps):
            running = [place for place, one in enumerate(clocked) if not one.episode.over]
            if not running:
                break
            asking = [place for place in running if clocked[place].wants_chunk(tick)]
            for places in [[place] for place in asking] if clock.seconds is None else [asking] if asking else []:
                _ask(clocked, places, tick, answer)
            for place in running:
                clocked[place].step(tick)
            shown(tasks)
        return tuple(one.record() for one in clocked)


def _ask(clocked: Sequence[_Clocked], places: Sequence[int], tick: int, answer: ActOnClock) -> None:
    asking = [clocked[place] for place in places]
    told = [one.timeline.request(tick) for one in asking]
    size, clock = asking[0].episode.task.spec.action_dim, asking[0].clock
    seen = stacked([stacked(one.episode.history) for one in asking])
    started = time.perf_counter()
    chunks = np.asarray(
        answer(seen, places, [one.chunks for one in asking], _stacked(told, size) if clock.rtc else None)
    )
    measured = time.perf_counter() - started
    if chunks.ndim != 3 or (len(chunks), chunks.shape[2]) != (len(asking), size):
        raise TaskError(
            f"the policy's chunks have shape {chunks.shape}, the task needs ({len(asking)}, actions, {size})"
        )
    clock.check(chunks.shape[1])
    for one, chunk in zip(asking, chunks, strict=True):
        one.answered(tick, chunk, measured)


def _stacked(told: Sequence[Previous | None], size: int) -> Previous | None:
    """As one batch; what there is not, has no weight."""
    known = [Previous(np.zeros((1, size)), 0) if one is None else one for one in told]
    length = max(len(one.actions) for one in known)
    padded = [np.concatenate([one.actions, *[one.actions[-1:]] * (length - len(one.actions))]) for one in known]
    return Previous(np.stack(padded), np.array([one.delay for one in known]), np.array([one.overlap for one in known]))


class _Clocked:
    """An episode, its timeline, and the chunk that is under way."""

    def __init__(self, episode: Episode, clock: Clock, watcher: Watcher | None) -> None:
        self.episode, self.clock, self._watcher = episode, clock, watcher
        self.timeline = ChunkTimeline(clock.replan, stop=clock.stop, overlap=clock.overlap, watcher=watcher)
        self.chunks, self.seams = 0, list[int]()
        self.first_tick: int | None = None
        self._coming: tuple[int, Array, float] | None = None

    def wants_chunk(self, tick: int) -> bool:
        """With the chunk that arrives at this tick taken, if one does."""
        if self._coming is not None and self._coming[0] <= tick:
            self._arrive(tick, *self._coming[1:])
            self._coming = None
        return self.timeline.wants_chunk(tick)

    def answered(self, tick: int, chunk: Array, measured: float) -> None:
        seconds = measured if self.clock.seconds is None else self.clock.latency(self.episode.seed, self.chunks)
        self.chunks += 1
        if late := self.clock.ticks(seconds):
            self._coming = tick + late, chunk, seconds
        else:
            self._arrive(tick, chunk, seconds)

    def _arrive(self, tick: int, chunk: Array, seconds: float) -> None:
        self.timeline.arrive(tick, chunk, {"latency_ms": seconds * 1e3})

    def step(self, tick: int) -> None:
        if self._watcher is not None:
            self._watcher.observed(tick, self.episode.history[-1])
        due = self.timeline.act(tick)
        if due.action is None:
            return
        if self.first_tick is None:
            self.first_tick = tick
        if due.seam:
            self.seams.append(len(self.episode.actions))
        self.episode.step(due.action)

    def record(self) -> ClockedRollout:
        counters, period = self.timeline.counters, 1 / self.clock.rate
        made = counters.ticks - counters.waiting - counters.held
        return ClockedRollout(
            **vars(self.episode.record()),
            counters=counters,
            first_action=None if self.first_tick is None else self.first_tick * period,
            action_hz=made / (counters.ticks * period) if counters.ticks else 0.0,
            seams=tuple(place for place in self.seams if place < len(self.episode.actions)),
        )
