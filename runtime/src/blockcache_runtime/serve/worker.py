"""One thread that runs the policy, and the queue before it. Knows nothing of protocols and sockets.

Every connection has one question at most in the queue, so first come, first served is fair. Questions of several clients are
answered in one run where that is faster; how many at a time is measured when the server warms up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from blockcache_runtime.checks import Array
from blockcache_runtime.errors import BlockcacheError, EngineError, in_one_line
from blockcache_runtime.serve.metrics import Metrics
from blockcache_runtime.serve.policies import ServedPolicy
from blockcache_runtime.serve.protocols import Question

BATCHES = (2, 4, 8)
WORTH = 0.9  # several are answered at once if each then takes at most so much of the time that it takes alone


@dataclass(eq=False)
class _Waiting:
    question: Question
    result: asyncio.Future[tuple[Array, float]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


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
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
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
        """The best of three runs behind one that does not count."""
        observation = {name: np.zeros((1, *shape), dtype=np.float32) for name, shape in self._policy.inputs.items()}
        took = []
        for _ in range(4):
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
        waiting = _Waiting(question)
        self._queue.append(waiting)
        self._metrics.count("waiting")
        self._arrived.set()
        try:
            return await asyncio.wait_for(waiting.result, patience)
        except asyncio.TimeoutError as error:
            raise EngineError(f"no action within {patience:g} s: too many clients ask; ask less often") from error
        finally:
            self._metrics.count("waiting", -1)

    async def run(self) -> None:
        """Answer until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            taken: list[_Waiting] = []
            while self._queue and len(taken) < self.batch:
                if not (waiting := self._queue.popleft()).result.done():  # nobody waits for it any more
                    taken.append(waiting)
            if not self._queue:
                self._arrived.clear()
            if taken:
                await self._answer(loop, taken)

    async def _answer(self, loop: asyncio.AbstractEventLoop, taken: list[_Waiting]) -> None:
        try:
            chunks, seconds = await loop.run_in_executor(self._pool, self._predict, [one.question for one in taken])
        except Exception as error:
            if len(taken) > 1:  # one of them is to blame: each by itself
                for one in taken:
                    await self._answer(loop, [one])
            elif not taken[0].result.done():
                taken[0].result.set_exception(_own(error))
            return
        self._metrics.count("batches_total")
        self._metrics.histograms["policy_seconds"].add(seconds)
        for one, chunk in zip(taken, chunks, strict=True):
            if not one.result.done():
                one.result.set_result((chunk, seconds))

    def _predict(self, questions: Sequence[Question]) -> tuple[list[Array], float]:
        started = time.perf_counter()
        chunks = self._policy.predict([one.observation for one in questions], [one.generator for one in questions])
        return chunks, time.perf_counter() - started

    def close(self) -> None:
        """Wait for the run that is under way."""
        self._pool.shutdown()


def _own(error: Exception) -> BlockcacheError:
    return error if isinstance(error, BlockcacheError) else EngineError(f"the policy failed ({in_one_line(error)})")
