"""What is said on a connection, without a network: each protocol's messages in, what follows out."""

import msgpack
import numpy as np
import pytest

from blockcache_runtime.errors import BlockcacheError, EngineError
from blockcache_runtime.serve.protocols import PROTOCOLS, Question, Served
from blockcache_runtime.serve.wire import pack, unpack
from served_toy import ACTIONS, ToyPolicy, state


def connection(name, policy=None, renamed=None, replan=ACTIONS):
    return PROTOCOLS[name](Served(policy or ToyPolicy(), renamed or {}, replan))


def openpi(protocol, **given):
    return protocol.receive(pack(given, bytes_keys=True))


def states(question):
    return question.observation["state"][0, :, 0].tolist()


def vla(protocol, kind, payload, seq, newest=True):
    data = pack({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}, bytes_keys=False)
    return protocol.receive(data, newest)


def chunk(question):
    return ToyPolicy().predict([question.observation], [question.generator])[0]


def test_openpi_greets_with_what_a_client_should_know():
    found = unpack(connection("openpi").greeting(), 100)
    assert found["inputs"] == {"state": [2]}
    assert found["n_obs_steps"] == 2
    assert found["n_action_steps"] == ACTIONS
    assert found["reset_key"] == "reset"
    assert found["seed_key"] == "seed"
    assert "each connection" in found["history"]


def test_history_is_kept_and_begins_anew_with_reset():
    protocol = connection("openpi")
    assert states(openpi(protocol, state=state(1))) == [1, 1]
    assert states(openpi(protocol, state=state(2), prompt="ignored")) == [1, 2]
    assert unpack(openpi(protocol, state=state(3), observe_only=True), 9) == {"observed": True}
    assert states(openpi(protocol, state=state(4))) == [3, 4]
    assert states(openpi(protocol, state=state(5), reset=True)) == [5, 5]
    assert states(openpi(protocol, state=np.array([[6, 0], [7, 0]]))) == [6, 7]
    assert states(openpi(protocol, state=state(8))) == [7, 8]


def test_noise_of_an_episode_follows_its_seed():
    protocol = connection("openpi")
    first = [chunk(openpi(protocol, state=state(0), reset=True, seed=5)), chunk(openpi(protocol, state=state(0)))]
    again = [chunk(openpi(protocol, state=state(0), reset=True, seed=5)), chunk(openpi(protocol, state=state(0)))]
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    direct = np.random.default_rng(5)
    assert [int(one[0, 2]) for one in first] == [int(direct.integers(1000)) for _ in range(2)]


def test_an_openpi_answer_has_actions_and_times():
    protocol = connection("openpi")
    question = openpi(protocol, state=state(1))
    found = unpack(protocol.answer(chunk(question), 2.5), 100)
    assert found["actions"].shape == (ACTIONS, 3)
    assert found["server_timing"] == {"infer_ms": 2.5}
    assert found["policy_timing"] == {"infer_ms": 2.5}
    protocol.finished(7.0)
    assert unpack(protocol.answer(chunk(question), 2.5), 100)["server_timing"]["prev_total_ms"] == 7.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "has no 'state', expected state, got nothing"),
        ({"states": state(1)}, "has no 'state', expected state, got states"),
        ({"state": np.zeros(3)}, r"shape \(3,\), expected \(2,\) or \(2, 2\)"),
        ({"state": "two"}, "is a str, expected an array"),
        ({"state": [1, "two"]}, "not an array of numbers"),
        ({"state": [[1], [2, 3]]}, "not an array of numbers"),
        ({"state": np.array([np.nan, 0])}, "NaN or infinity"),
        ({"state": np.array([1e20, 0])}, "values beyond"),
        ({"state": state(9), "reset": 1}, "reset is true or false"),
        ({"state": state(9), "reset": True, "seed": -1}, "a seed is a whole number"),
        ({"state": state(9), "seed": 1}, "send reset with it"),
        ({"state": np.zeros(3), "reset": True}, "shape"),
    ],
)
def test_what_openpi_refuses_leaves_the_history_as_it_was(given, said):
    protocol = connection("openpi")
    openpi(protocol, state=state(1))
    with pytest.raises(BlockcacheError, match=said):
        openpi(protocol, **given)
    assert states(openpi(protocol, state=state(2))) == [1, 2]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_text_is_refused(name):
    with pytest.raises(BlockcacheError, match="text message"):
        connection(name).receive("hello")


def frames(height_first=True, dtype=np.uint8):
    return np.full((4, 5, 3) if height_first else (3, 4, 5), 7, dtype)


def test_frames_are_taken_with_channels_last_or_first_and_by_the_client_s_names():
    policy = ToyPolicy(camera=True)
    protocol = connection("openpi", policy, {"images/top": "image"})
    for image in (frames(), frames(height_first=False)):
        question = openpi(protocol, state=state(1), images={"top": image}, reset=True)
        assert question.observation["image"].shape == (1, 2, 3, 4, 5)
        assert question.observation["image"].dtype == np.uint8
    for image, said in (
        (np.zeros((8, 8, 3), np.uint8), r"shape \(8, 8, 3\)"),
        (frames(dtype=np.int64), "holds int64"),
        (np.full((4, 5, 3), 200.0), "0 to 1"),
    ):
        with pytest.raises(BlockcacheError, match=said):
            openpi(protocol, state=state(1), images={"top": image})
    with pytest.raises(BlockcacheError, match="all moments of"):
        openpi(protocol, state=np.zeros((2, 2)), images={"top": frames()})
    with pytest.raises(BlockcacheError, match="two values under one name"):
        openpi(protocol, state=state(1), image=frames(), images={"top": frames()})


def test_what_is_made_outside_of_the_policy_has_no_moments():
    policy = ToyPolicy()
    policy.inputs["words"], policy.outside = (2, 7), {"words": "made by a text encoder"}  # two tokens, not two moments
    protocol = connection("openpi", policy)
    assert unpack(protocol.greeting(), 100)["inputs"] == {"state": [2], "words": [2, 7]}
    for value in (1, 2):
        question = openpi(protocol, state=state(value), words=np.ones((2, 7)))
        assert question.observation["words"].shape == (1, 2, 7)
    assert states(question) == [1, 2]


def test_what_a_server_cannot_be_started_with():
    for settings, said in (
        ({"renamed": {"a": "nothing"}}, "expected one of the policy's inputs: state"),
        ({"replan": ACTIONS + 1}, "replan is 1 to the policy's 4"),
    ):
        with pytest.raises(EngineError, match=said):
            connection("openpi", **settings)
    policy = ToyPolicy()
    policy.inputs["reset"] = (2, 1)
    with pytest.raises(EngineError, match="rename that input"):
        connection("openpi", policy)


def test_vla_eval_gets_one_action_a_step_and_a_new_chunk_when_the_last_is_used_up():
    protocol = connection("vla-eval", replan=2)
    vla(protocol, "episode_start", {"task": {"seed": 3}}, 1)
    question = vla(protocol, "observation", {"state": state(1)}, 2)
    expected = chunk(Question(question.observation, np.random.default_rng(3), 0))
    reply = unpack(protocol.answer(expected, 1.0), 9)
    assert reply["type"] == "action"
    assert reply["seq"] == 2
    assert np.array_equal(reply["payload"]["actions"], expected[0])
    reply = unpack(vla(protocol, "observation", {"state": state(2)}, 3), 9)
    assert reply["seq"] == 3
    assert np.array_equal(reply["payload"]["actions"], expected[1])
    assert states(vla(protocol, "observation", {"state": state(3)}, 4)) == [2, 3]
    vla(protocol, "episode_end", {}, 5)
    vla(protocol, "episode_start", {}, 6)
    assert states(vla(protocol, "observation", {"state": state(4)}, 7)) == [4, 4]


def test_vla_eval_s_hello():
    reply = unpack(vla(connection("vla-eval"), "hello", {"protocol_version": 1, "harness_version": "0.8.0"}, 1), 9)
    assert reply["type"] == "hello"
    assert reply["payload"]["protocol_version"] == 1
    assert {"harness_version", "model_server", "capabilities"} <= set(reply["payload"])
    with pytest.raises(BlockcacheError, match="version 2 of the protocol"):
        vla(connection("vla-eval"), "hello", {"protocol_version": 2}, 1)


def test_an_observation_twice_or_out_of_order_is_left_out():
    protocol = connection("vla-eval")
    vla(protocol, "observation", {"state": state(1)}, 5)
    for seq in (5, 4):
        with pytest.raises(BlockcacheError, match=f"observation {seq} came twice or behind 5"):
            vla(protocol, "observation", {"state": state(2)}, seq)
    assert states(vla(protocol, "observation", {"state": state(3)}, 6)) == [1, 3]


def test_a_live_client_is_answered_with_the_action_of_its_newest_observation():
    protocol = connection("vla-eval")
    vla(protocol, "episode_start", {"mode": "live"}, 1)
    assert vla(protocol, "observation", {"state": state(1)}, 2, newest=False) is None
    question = vla(protocol, "observation", {"state": state(2)}, 3)
    assert states(question) == [1, 2]
    expected = chunk(question)
    protocol.answer(expected, 1.0)
    assert vla(protocol, "observation", {"state": state(3)}, 4, newest=False) is None
    reply = unpack(vla(protocol, "observation", {"state": state(4)}, 5), 9)
    assert np.array_equal(reply["payload"]["actions"], expected[2])  # what is late is skipped, not played late


def test_what_a_live_client_shows_while_a_chunk_is_made_is_seen_and_the_chunk_s_late_actions_are_skipped():
    protocol = connection("vla-eval")
    vla(protocol, "episode_start", {"mode": "live"}, 1)
    question = vla(protocol, "observation", {"state": state(1)}, 2)
    for seq in (3, 4):
        assert vla(protocol, "observation", {"state": state(seq)}, seq, newest=False) is None
    assert protocol.return_to(question)
    expected = chunk(question)
    reply = unpack(protocol.answer(expected, 1.0), 9)
    assert reply["seq"] == 2
    assert np.array_equal(reply["payload"]["actions"], expected[0])
    reply = unpack(vla(protocol, "observation", {"state": state(5)}, 5), 9)
    assert np.array_equal(reply["payload"]["actions"], expected[3])
    assert states(vla(protocol, "observation", {"state": state(6)}, 6)) == [5, 6]
    vla(protocol, "episode_start", {"mode": "live"}, 7)
    assert not protocol.return_to(question), "its episode is over"


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"type": "observation", "payload": {}, "timestamp": 0},
        {"type": "observation", "payload": [], "seq": 1, "timestamp": 0},
        {"type": "observation", "payload": {}, "seq": True, "timestamp": 0},
        {"type": "observation", "payload": {}, "seq": -1, "timestamp": 0},
        {"type": "action", "payload": {}, "seq": 1, "timestamp": 0},
        {"type": "observation", "payload": {}, "seq": 1, "timestamp": 0},
        {"type": "episode_start", "payload": {"task": {"seed": "x"}}, "seq": 1, "timestamp": 0},
    ],
)
def test_what_vla_eval_refuses_is_an_error_message(words):
    protocol = connection("vla-eval")
    with pytest.raises(BlockcacheError) as error:
        protocol.receive(msgpack.packb(words))
    reply = unpack(protocol.refusal(str(error.value)), 9)
    seq = words.get("seq") if type(words.get("seq")) is int and words["seq"] > 0 and words["payload"] != [] else 0
    assert reply["type"] == "error"
    assert reply["payload"]["error"] == str(error.value)
    assert reply["seq"] == seq
