"""A policy in a control loop: actions at a steady rate while the next chunk is computed by a thread of its own.

    with Player(open_export("policy.onnx"), rate_hz=30, replan=4) as player:
        while True:
            player.observe(robot.observation())
            action = player.next_action()  # never waits; None until the first chunk is there
            if action is not None:
                robot.execute(action)
            sleep_until_the_next_tick()

Which action is due, and when a chunk is asked for, is decided by `ChunkTimeline`; a tick is one call of `next_action`, so
that a delay is counted in actions that were really consumed. Knows nothing of robots.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from blockcache_runtime.checks import Array
from blockcache_runtime.chunks import ChunkTimeline, Previous, Watcher, check_horizon
from blockcache_runtime.errors import EngineError, ObservationError
from blockcache_runtime.export import ExportedPolicy
from blockcache_runtime.history import History
from blockcache_runtime.observation_log import ObservationLog

LATE = 1.5  # periods between two ticks from which on the loop itself counts as late
WARM_UP = 3  # generations before the first that counts
CLOCK_BACK = 1.0  # seconds from which on a stamp that goes back is a clock that was set back
COUNTED = ("late", "failed", "ignored", "clock_back", "unseen")  # beside what the timeline counts


class Actor(Protocol):
    """What the player needs of a policy, called from its thread only."""

    n_obs_steps: int
    cameras: Collection[str]

    def warm_up(self) -> int:
        """Run once on made-up numbers, for as long as a chunk takes but the first time; returns how many actions one has."""

    def encode_frames(self, observed: Any) -> None:
        """Look at frames ahead of the next chunk, where there are any."""

    def chunk(self, observed: Any, previous: Previous | None) -> Array:
        """The actions from the first that is due on, (n, A)."""


class ExportActor:
    """An exported policy for a player."""

    def __init__(self, policy: ExportedPolicy, seed: int | None = None) -> None:
        """Act with it.

        Args:
            policy: What `open_export` gave.
            seed: Of the noise of all chunks; another one each time without it.
        """
        self.policy, self.n_obs_steps = policy, policy.n_obs_steps
        self.cameras: Collection[str] = policy.cameras
        self._generator = np.random.default_rng(seed)
        self._warm = False
        self.figures: dict[str, float] = {}
        """What the guard found of the last chunk, for a watcher."""

    def warm_up(self) -> int:
        """See `Actor`. What only some chunks need runs the first time only, so that the others take as long as a chunk."""
        found = self.policy.warm_up(encoder=not self._warm, full=not self._warm)
        self._warm = True
        return int(self.policy.due_actions(found).shape[1])

    def encode_frames(self, observed: Any) -> None:
        """See `Actor`."""
        self.policy.encode_frames(observed)

    def chunk(self, observed: Any, previous: Previous | None) -> Array:
        """See `Actor`."""
        told = previous if self.policy.takes_previous else None
        found = self.policy.predict_action(observed, generator=self._generator, previous=told)
        self.figures = {name: float(value[0]) for name, value in found.items() if name.startswith("guard_")}
        actions: Array = self.policy.due_actions(found)[0]
        return actions


class Player(AbstractContextManager["Player"]):
    """Made, used and stopped by one thread, that of the control loop."""

    def __init__(
        self,
        policy: ExportedPolicy | Actor,
        rate_hz: float = 30,
        replan: int = 4,
        *,
        overlap: int = 0,
        seed: int | None = None,
        log: ObservationLog | None = None,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.monotonic,
        worker: Executor | None = None,
    ) -> None:
        """Warm the policy up, and refuse a rate that it cannot hold.

        Args:
            policy: An exported policy, or whatever acts as one.
            rate_hz: How often `next_action` will be called.
            replan: Ticks from one chunk's request to the next.
            overlap: Up to which action the old chunk pulls a new one, for policies that take it (real-time chunking).
            seed: Of an exported policy's noise.
            log: Keeps what the policy was asked and what it answered.
            watcher: Told of every observation, chunk and action, such as `RerunFile.watcher` gives.
            clock: Seconds that never go back.
            worker: Runs the policy, one call at a time, and is not shut down; without it one thread of the player's own.
        """
        if not 0 < rate_hz <= 10_000:
            raise EngineError(f"rate_hz is actions a second, more than 0 and at most 10,000, got {rate_hz}")
        self._actor: Actor = ExportActor(policy, seed) if isinstance(policy, ExportedPolicy) else policy
        self._export = policy if isinstance(policy, ExportedPolicy) else None
        if overlap and self._export is not None and not self._export.takes_previous:
            raise EngineError(
                f"{self._export.path} cannot be told of the chunk before, got overlap={overlap}; export it with --rtc, or "
                "leave overlap out"
            )
        timeless = () if self._export is None else self._export.timeless
        self._timeline = ChunkTimeline(replan, overlap=overlap, watcher=watcher)
        self._history = History(self._actor.n_obs_steps, timeless)
        self._clock, self._period, self._log, self._watcher = clock, 1 / rate_hz, log, watcher
        self._owns_worker = worker is None
        self._worker = worker or ThreadPoolExecutor(1, "blockcache-player")
        self._stopped = False
        self._begin()
        try:
            self._warm_up(replan)
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        self._observed: Any = None
        self._seen = False  # something was observed since a chunk was asked for
        self._observed_at = -math.inf
        self._pending: Future[tuple[Array, dict[str, float]]] | None = None
        self._encoding: Future[None] | None = None
        self._tick, self._last_call = 0, math.inf
        self._encodes_ahead = bool(self._actor.cameras)
        self._counts, self._judged = dict.fromkeys(COUNTED, 0), self._guard_counts()
        self.error: Exception | None = None
        """What failed last."""

    def _warm_up(self, replan: int) -> None:
        took = []
        for _ in range(WARM_UP):
            started = self._clock()
            actions = self._worker.submit(self._actor.warm_up).result()
            took.append(self._clock() - started)
        check_horizon(actions, replan, math.ceil(min(took) / self._period))
        # what is there now stays while the loop runs: to look through it for garbage would stop a tick for milliseconds
        gc.collect()
        gc.freeze()

    @property
    def counters(self) -> dict[str, int]:
        """Everything that happened since the start, or `reset`, by name: those of `chunks.Counters`, and

        - late: calls of `next_action` that came more than half a period late
        - failed: chunks, or features of frames ahead of them, that did not come; `error` says why
        - ignored: observations that were not newer than the one before
        - clock_back: observations that were taken all the same, since their clock was set back by more than a second
        - unseen: chunks that were asked for though nothing was observed since the one before was
        """
        guard = {f"guard_{name}": count - self._judged[name] for name, count in self._guard_counts().items()}
        return {**asdict(self._timeline.counters), **self._counts, **guard}

    def _guard_counts(self) -> dict[str, int]:
        watch = None if self._export is None else self._export.watch
        return {} if watch is None else watch.counts

    def observe(self, observation: Any, at: float | None = None) -> None:
        """Show the player what the robot sees now; once for every tick, before `next_action`.

        Args:
            observation: As `History.push` takes it; one that is refused raises ObservationError and changes nothing.
            at: When it was made in seconds, where that is known, on a clock of the caller's: one that is not newer than the
                last is counted and left out, unless the clock was set back.
        """
        if at is not None and not math.isfinite(at):
            raise ObservationError(f"an observation is made at a finite time in seconds, got at={at}; leave at out")
        back = -math.inf if at is None else self._observed_at - at
        if 0 <= back <= CLOCK_BACK:
            self._counts["ignored"] += 1
            return
        if self._export is not None:
            self._export.check_moment(observation)
        self._observed = self._history.push(observation)
        self._observed_at = self._observed_at if at is None else at
        self._counts["clock_back"] += back > CLOCK_BACK
        self._seen = True
        if self._watcher is not None:
            self._watcher.observed(self._tick, observation)

    def next_action(self) -> Array | None:
        """The action of this tick, at once: of the newest chunk, or the last one again where there is none left.

        None before the first chunk has come: keep the robot where it is. The array is the caller's own.
        """
        if self._stopped:
            raise EngineError("the player was stopped; make another one")
        tick, now = self._tick, self._clock()
        self._counts["late"] += now - self._last_call > LATE * self._period
        self._tick, self._last_call = tick + 1, now
        self._collect(tick)
        if self._observed is not None and self._timeline.wants_chunk(tick):
            previous = self._timeline.request(tick)
            self._counts["unseen"] += not self._seen
            self._seen = False
            episode = None if self._log is None else self._log.episode
            self._pending = self._worker.submit(self._chunk, self._observed, previous, episode)
            self._collect(tick)
        elif self._pending is None:
            self._encode_ahead(tick)
        action = self._timeline.act(tick).action
        if action is None and self._timeline.counters.chunks:
            self.error = EngineError(
                "every action of the chunks that came was late: the policy is slower than when it was warmed up, or "
                f"next_action is called more often than {1 / self._period:g} times a second, which was promised as rate_hz"
            )
        return None if action is None else action.copy()

    def _collect(self, tick: int) -> None:
        if self._pending is None or not self._pending.done():
            return
        pending, self._pending = self._pending, None
        if (error := pending.exception()) is None:
            self._timeline.arrive(tick, *pending.result())
        else:
            self._timeline.forget_request()
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._counts["failed"] += 1
        self.error = error if isinstance(error, Exception) else EngineError(str(error))

    def _encode_ahead(self, tick: int) -> None:
        """Frames that the next chunk will look at too are encoded by the player's thread, while it has nothing to do.

        Once that has failed, chunks encode all of their frames themselves.
        """
        if self._encoding is not None and self._encoding.done():
            error, self._encoding = self._encoding.exception(), None
            if error is not None:
                self._encodes_ahead = False
                self._fail(error)
        if not self._encodes_ahead or self._observed is None or self._encoding is not None:
            return
        if any(self._timeline.wants_chunk(tick + ahead) for ahead in range(1, self._actor.n_obs_steps)):
            self._encoding = self._worker.submit(self._actor.encode_frames, self._observed)

    def _chunk(self, observed: Any, previous: Previous | None, episode: int | None) -> tuple[Array, dict[str, float]]:
        started = self._clock()
        actions = self._actor.chunk(observed, previous)
        figures = {"latency_ms": (self._clock() - started) * 1e3, **getattr(self._actor, "figures", {})}
        if self._log is not None:
            try:
                self._log.add(observed, actions, episode)
            except ObservationError as error:  # the robot goes on; the log counts it
                self.error = error
        return actions, figures

    def reset(self) -> None:
        """Another episode begins: what was seen, and a chunk that is under way, no longer count."""
        self._history.reset()
        self._timeline.reset()
        self._begin()
        if self._log is not None:
            self._log.begin_episode()

    def stop(self) -> None:
        """Wait for the generation that is under way, and end the player's own thread."""
        if not self._stopped:
            gc.unfreeze()
        self._stopped = True
        if self._owns_worker:
            self._worker.shutdown(wait=True, cancel_futures=True)
        elif self._pending is not None:
            self._pending.exception()  # which waits for it

    def __exit__(self, *exception: object) -> None:
        self.stop()
