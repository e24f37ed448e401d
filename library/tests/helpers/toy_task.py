"""A task of a few numbers, for tests of whole evaluations; it fails, stalls and is interrupted where a test says."""

import os
import signal
import time

import numpy as np
import torch

from blockcache.tasks import TaskEntry, TaskSpec

SPEC = TaskSpec("toy", obs_dim=5, action_dim=3, max_steps=9, success="within 0.6 of the centre", extra="toy")
ENTRY = TaskEntry(SPEC, f"{__name__}:Toy")  # looked up when a task is made, so a test may put another in its place


class Toy:
    """A point that drifts where the actions say. `fails` maps a seed to the step at which the simulator raises; while
    the file `kill` exists, its first step kills the process; `slow` is the time of a step; the seed `interrupt` is
    where somebody presses Ctrl-C."""

    def __init__(self, spec=SPEC, fails=None, kill=None, slow=0.0, interrupt=None):
        self.spec, self.fails, self.kill, self.slow, self.interrupt = spec, fails or {}, kill, slow, interrupt

    def reset(self, seed):
        self.seed, self.steps, self.best = seed, 0, 0.0
        self.place = np.random.default_rng(seed).normal(size=3)
        return self.observe()

    def observe(self):
        return np.array([*self.place, self.steps / 9, self.seed % 7], dtype=np.float32)

    def step(self, action):
        time.sleep(self.slow)
        if self.kill is not None and os.path.exists(self.kill) and self.seed == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.interrupt == self.seed:
            raise KeyboardInterrupt
        if self.fails.get(self.seed) == self.steps:
            raise RuntimeError("the table broke")
        self.place = 0.9 * self.place + 0.2 * np.tanh(action)
        self.steps += 1
        self.best = max(self.best, 1 / (1 + float(np.linalg.norm(self.place))))

    @property
    def score(self):
        return self.best

    @property
    def success(self):
        return self.best > 1 / 1.6

    @property
    def done(self):
        return self.steps >= self.spec.max_steps

    def render(self):
        return np.full((20, 30, 3), 25 * self.steps, dtype=np.uint8)

    def close(self):
        pass


def observations(count=12):
    return torch.randn(count, 2, 5, generator=torch.Generator().manual_seed(0))
