"""A live client of vla-eval on a real port: it sends at a steady rate, whether or not it is answered."""

import contextlib
import threading
import time

import numpy as np
import pytest

from blockcache_runtime.serve.server import READ_AHEAD
from blockcache_runtime.serve.wire import pack, unpack
from served_toy import ToyPolicy, served

client = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")

PERIOD, INFERENCE = 0.01, 0.15


class SlowPolicy(ToyPolicy):
    """Notes, when it is asked, which observations it is shown and how many the client has sent."""

    def __init__(self):
        super().__init__()
        self.sent, self.asked = 0, []

    def predict(self, observations, generators):
        self.asked.append((self.sent, observations[0]["state"][0, :, 0].tolist()))
        return super().predict(observations, generators)


def message(kind, payload, seq):
    return pack({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}, bytes_keys=False)


@contextlib.contextmanager
def live(policy, replan):
    """A connection on which an episode has begun, and the policy is slow."""
    with (
        served(policy, protocol="vla-eval", replan=replan) as server,
        client.connect(f"ws://127.0.0.1:{server.port}", compression=None) as connection,
    ):
        policy.asked.clear()
        policy.seconds = INFERENCE
        connection.send(message("episode_start", {"mode": "live"}, 0))
        yield connection


def observation(number):
    return message("observation", {"state": np.array([number, 0], np.float32)}, number)


def talk(policy, seconds, replan):
    """Send observations that count up, steadily; returns each reply and how many were sent by then."""
    received = []
    with live(policy, replan) as connection:

        def listen():
            received.extend((unpack(data, 9), policy.sent) for data in connection)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        end, due = time.monotonic() + seconds, time.monotonic()
        while due < end:
            policy.sent += 1
            connection.send(observation(policy.sent))
            due += PERIOD
            time.sleep(max(0.0, due - time.monotonic()))
        time.sleep(INFERENCE)
    listener.join(10)
    return received


@pytest.mark.parametrize("replan", [1, 4])
def test_a_slow_policy_sees_what_has_arrived_and_does_not_fall_behind(replan):
    policy = SlowPolicy()
    received = talk(policy, 2.5, replan)
    behind = [sent - shown[-1] for sent, shown in policy.asked]
    # a few on their way, and a busy machine's share; where the lag grows, both end beyond 150
    assert np.median(behind[len(behind) // 2 :]) <= INFERENCE / PERIOD, behind
    assert all(shown[-1] - shown[0] in (0, 1) for _, shown in policy.asked), "an observation is missing"
    late = [sent - reply["payload"]["actions"][1] for reply, sent in received]
    assert np.median(late[len(late) // 2 :]) <= 4 * INFERENCE / PERIOD, late
    assert {reply["type"] for reply, _ in received} == {"action"}
    if replan == 1:
        assert all(reply["seq"] == reply["payload"]["actions"][1] for reply, _ in received), "answers another message"


def test_the_answer_of_an_episode_that_is_over_is_not_sent():
    policy = SlowPolicy()
    with live(policy, 1) as connection:
        connection.send(observation(1))
        while not policy.asked:
            time.sleep(0.001)
        connection.send(message("episode_start", {"mode": "live"}, 2))
        for number in range(3, 4 + READ_AHEAD):
            connection.send(observation(number))
        assert unpack(connection.recv(timeout=10), 9)["seq"] == 3 + READ_AHEAD
