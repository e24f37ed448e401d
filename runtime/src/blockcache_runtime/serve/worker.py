"""One thread that runs the policy, and the queue before it. Knows nothing of protocols and sockets.

Every connection has one question at most in the queue, so first come, first served is fair. Questions of several clients are
answered in one run where that is faster; how many at a time is measured when the server warms up. The thread takes questions
from the queue by itself: every change of thread that is saved is saved twice at each request.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from blockcache_runtime.checks import Array
from blockcache_runtime.errors import BlockcacheError, EngineError, in_one_line
from blockcache_runtime.guard import Judgement
from blockcache_runtime.serve.metrics import Metrics
from blockcache_runtime.serve.policies import ServedPolicy
from blockcache_runtime.serve.protocols import Question

BATCHES = (2, 4, 8)
WORTH = 0.9  # several are answered at once if each then takes at most so much of the time that it takes alone


@dataclass(eq=False)
class _Waiting:
    question: Question
    result: asyncio.Future[tuple[Array, float]]


class Worker:
    """Answers questions, one run of the policy at a time."""

    def __init__(self, policy: ServedPolicy, metrics: Metrics) -> None:
        """Nothing runs before `warm_up`.

        Args:
            policy: What is asked.
            metrics: Counts runs and their durations.
        """
        self._policy, self._metrics = policy, metrics
        self._pool = ThreadPoolExecutor(1, "blockcache-policy")
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._running: Future[None] | None = None
        self._since: float | None = None  # when the run began that is under way
        self.batch, self.milliseconds = 1, 0.0
        """How many are answered at once at most, and how long one alone takes."""

    def warm_up(self, clients: int) -> None:
        """Run the policy a few times, and find out how many questions are best answered together.

        Args:
            clients: How many can be connected.
        """
        one = self._seconds(1)
        self.milliseconds, best = one * 1e3, one
        for size in BATCHES if self._policy.batches else ():
            if size <= clients and (each := self._seconds(size) / size) < WORTH * best:
                self.batch, best = size, each

    def _seconds(self, size: int) -> float:
        """The best of three runs behind one that does not count; the frames of each are new, and are encoded."""
        took = []
        for run in range(4):
            inputs = self._policy.inputs.items()
            observation = {name: np.full((1, *shape), run / 4, dtype=np.float32) for name, shape in inputs}
            started = time.perf_counter()
            self._pool.submit(
                self._policy.predict, [observation] * size, [np.random.default_rng(0) for _ in range(size)]
            ).result()
            took.append(time.perf_counter() - started)
        return min(took[1:])

    async def ask(self, question: Question, patience: float) -> tuple[Array, float]:
        """The chunk for a question, and how many seconds its run took.

        Args:
            question: What is asked.
            patience: Seconds after which an EngineError is raised instead.
        """
        waiting = _Waiting(question, asyncio.get_running_loop().create_future())
        self._metrics.count("waiting")
        self._queue.put(waiting)
        try:
            return await asyncio.wait_for(waiting.result, patience)
        except asyncio.TimeoutError as error:
            raise EngineError(f"no action within {patience:g} s: too many clients ask; ask less often") from error
        finally:
            self._metrics.count("waiting", -1)

    def start(self) -> None:
        """Answer until closed, to the loop that runs now."""
        self._running = self._pool.submit(self._run, asyncio.get_running_loop())

    def trouble(self, patience: float) -> str | None:
        """Why nobody is answered, if so: the thread has ended, or one run takes longer than `patience` seconds."""
        since = self._since
        if self._running is not None and self._running.done():
            return "the thread of the policy has ended; start the server again"
        if since is not None and (took := time.perf_counter() - since) > patience:
            return f"the policy has been busy with one run for {took:.0f} s"
        return None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while (first := self._queue.get()) is not None:
            taken: list[_Waiting | None] = [first]
            while len(taken) < self.batch and taken[-1] is not None and not self._queue.empty():
                taken.append(self._queue.get())  # nobody else takes any
            self._since = time.perf_counter()
            self._answer(loop, [one for one in taken if one is not None and not one.result.done()])
            self._since = None
            if taken[-1] is None:
                return

    def _answer(self, loop: asyncio.AbstractEventLoop, taken: list[_Waiting], judged: Judgement | None = None) -> None:
        if not taken:
            return
        started, questions = time.perf_counter(), [one.question for one in taken]
        observations, generators = [one.observation for one in questions], [one.generator for one in questions]
        drawn = [generator.bit_generator.state for generator in generators]
        try:
            if judged is None:
                judged = self._judge(loop, questions)
            chunks = self._policy.predict(observations, generators, *(() if judged is None else (judged,)))
        except Exception as error:
            for generator, state in zip(generators, drawn, strict=True):
                generator.bit_generator.state = state
            if len(taken) == 1:
                loop.call_soon_threadsafe(_refuse, taken[0], _own(error))
            for place, one in enumerate(taken if len(taken) > 1 else ()):  # one of them is to blame: each by itself
                self._answer(loop, [one], None if judged is None else judged.of(place))
            return
        loop.call_soon_threadsafe(self._deliver, taken, chunks, time.perf_counter() - started)

    def _judge(self, loop: asyncio.AbstractEventLoop, questions: list[Question]) -> Judgement | None:
        judge = getattr(self._policy, "judge", None)  # of exports, which may have a guard
        given = [one.observation for one in questions], [one.recent for one in questions]
        judged: Judgement | None = None if judge is None else judge(*given)
        for reason, count in {} if judged is None else judged.counts.items():
            loop.call_soon_threadsafe(self._metrics.count, "guard_total", count, reason)
        return judged

    def _deliver(self, taken: list[_Waiting], chunks: list[Array], seconds: float) -> None:
        self._metrics.count("batches_total")
        self._metrics.histograms["policy_seconds"].add(seconds)
        for one, chunk in zip(taken, chunks, strict=True):
            if not one.result.done():  # somebody still waits for it
                one.result.set_result((chunk, seconds))

    def close(self) -> None:
        """Wait for what was asked."""
        self._queue.put(None)
        self._pool.shutdown()


def _refuse(waiting: _Waiting, error: BlockcacheError) -> None:
    if not waiting.result.done():
        waiting.result.set_exception(error)


def _own(error: Exception) -> BlockcacheError:
    return error if isinstance(error, BlockcacheError) else EngineError(f"the policy failed ({in_one_line(error)})")
