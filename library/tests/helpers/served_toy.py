"""A policy whose answers tell what it was shown, and a server around it in a thread of its own."""

import asyncio
import contextlib
import threading
import time

import numpy as np

from blockcache_runtime.serve.server import Server
from blockcache_runtime.serve.settings import Settings

STEPS, ACTIONS, DIM = 2, 4, 3


class ToyPolicy:
    """Action i of a chunk is: first state in the history, last state, i + a whole number out of the generator."""

    name, batches, outside = "toy", True, {}
    n_obs_steps, n_action_steps, action_dim = STEPS, ACTIONS, DIM

    def __init__(self, camera=False, seconds=0.0):
        self.inputs = {"state": (STEPS, 2)} | ({"image": (STEPS, 3, 4, 5)} if camera else {})
        self.cameras = frozenset({"image"} if camera else ())
        self.seconds, self.sizes, self.seen, self.failing = seconds, [], [], False

    def predict(self, observations, generators):
        self.sizes.append(len(observations))
        self.seen += observations
        time.sleep(self.seconds)
        if self.failing and any(one["state"][0, -1, 0] == 13 for one in observations):
            raise ValueError("thirteen")
        found = []
        for one, generator in zip(observations, generators, strict=True):
            state, drawn = one["state"][0], generator.integers(1000)
            rows = [(state[0, 0], state[-1, 0], place + drawn) for place in range(ACTIONS)]
            found.append(np.array(rows, dtype=np.float32))
        return found


@contextlib.contextmanager
def served(policy=None, **settings):
    """A running server; its port is `server.port`."""
    server = Server(policy or ToyPolicy(), Settings(**{"port": 0, **settings}))
    ready, failure = threading.Event(), []
    stop = asyncio.Event()

    def run():
        async def main():
            server.loop, server.stop = asyncio.get_running_loop(), stop
            await server.run(lambda line: (setattr(server, "said", line), ready.set()), stop)

        try:
            asyncio.run(main())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30)
        if failure:
            raise failure[0]
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # it is closed already
            server.loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive(), "the server does not stop"


def state(value):
    """What a client observes."""
    return np.array([value, 0], dtype=np.float32)
