"""The thread that runs the policy, without a network."""

import asyncio

import numpy as np

from blockcache_runtime.guard import Judgement
from blockcache_runtime.serve.metrics import Metrics
from blockcache_runtime.serve.protocols import Question
from blockcache_runtime.serve.worker import Worker
from served_toy import STEPS, ToyPolicy


class GuardedToy(ToyPolicy):
    """Has a guard, and draws before it fails at 13."""

    def __init__(self):
        super().__init__()
        self.judged = 0

    def judge(self, observations, recent):
        self.judged += len(observations)
        return Judgement(np.zeros(len(observations)), np.zeros(len(observations), bool))

    def predict(self, observations, generators, judged=None):
        assert judged is None or len(judged.scores) == len(observations)
        found = super().predict(observations, generators)
        if any(one["state"][0, -1, 0] == 13 for one in observations):
            raise ValueError("thirteen")
        return found


def asked_together(policy, values):
    """What each client is answered, and what was counted, where all are answered in one run if that succeeds."""
    metrics = Metrics()

    async def main():
        worker = Worker(policy, metrics)
        worker.batch = len(values)
        asking = [
            asyncio.ensure_future(
                worker.ask(Question({"state": np.full((1, STEPS, 2), value)}, np.random.default_rng(5), 0), 10)
            )
            for value in values
        ]
        await asyncio.sleep(0)  # all are in the queue
        worker.start()
        found = await asyncio.gather(*asking, return_exceptions=True)
        worker.close()
        return found

    return asyncio.run(main()), metrics.values


def test_every_run_of_the_warm_up_sees_new_frames():
    policy = ToyPolicy(camera=True)
    worker = Worker(policy, Metrics())
    worker.warm_up(1)
    worker.close()
    assert len({one["image"].tobytes() for one in policy.seen}) == len(policy.seen) == 4


def test_one_client_s_failure_changes_neither_another_s_noise_nor_what_is_counted():
    policy = GuardedToy()
    (good, bad), counted = asked_together(policy, (1, 13))
    assert policy.sizes == [2, 1, 1]
    assert "thirteen" in str(bad)
    assert good[0][0, 2] == np.random.default_rng(5).integers(1000)
    assert policy.judged == 2
    assert counted["guard_total", "judged"] == 2
