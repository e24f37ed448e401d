"""A player under a clock that the test moves, and a policy that counts."""

import numpy as np

from blockcache_runtime import Player
from blockcache_runtime.errors import ObservationError

RATE, ACTIONS = 50, 12


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Later:
    """What a worker will have done at some time of the clock."""

    def __init__(self, clock, ready, value, error):
        self._clock, self._ready, self._value, self._error = clock, ready, value, error

    def done(self):
        return self._clock.now >= self._ready

    def exception(self):
        return self._error

    def result(self):
        self._clock.now = max(self._clock.now, self._ready)
        if self._error is not None:
            raise self._error
        return self._value


class Worker:
    """One thread's work under a clock: each piece takes as long as the test says, one after the other."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.free, self.stopped, self.submitted = clock, seconds, 0.0, False, []

    def submit(self, work, *args):
        assert not self.stopped
        self.submitted.append(work.__name__)
        value = error = None
        try:
            value = work(*args)
        except Exception as raised:
            error = raised
        self.free = max(self.free, self.clock.now) + self.seconds()
        return Later(self.clock, self.free, value, error)

    def shutdown(self, wait=True, cancel_futures=False):
        self.stopped = True


class Ramp:
    """Sees one number, the tick, and plans to count on from there: action i of a chunk is that number + i."""

    n_obs_steps, cameras = 2, ()

    def __init__(self, actions=ACTIONS):
        self.actions, self.seen, self.previous, self.failing = actions, [], [], False

    def warm_up(self):
        return self.actions

    def encode_frames(self, observed):
        self.seen.append("frames")

    def chunk(self, observed, previous):
        if self.failing:
            raise ObservationError("no light")
        self.seen.append(observed[0, :, 0].tolist())
        self.previous.append(previous)
        return observed[0, -1, 0] + np.arange(self.actions, dtype=np.float32)[:, None]


def made(seconds=0.0, actor=None, **settings):
    clock = Clock()
    took = seconds if callable(seconds) else lambda: seconds
    worker = Worker(clock, took)
    player = Player(actor or Ramp(), RATE, **{"replan": 4, **settings}, clock=clock, worker=worker)
    return player, clock, worker


def play(player, clock, ticks, first=0, stall=lambda tick: 0.0):
    found = []
    for tick in range(first, first + ticks):
        player.observe(np.array([tick], np.float32))
        action = player.next_action()
        found.append(None if action is None else float(action[0]))
        clock.now += 1 / RATE + stall(tick)
    return found
