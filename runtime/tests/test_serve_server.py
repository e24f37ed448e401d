"""The server on a real port: public wire formats, limits, misbehaving clients, signals."""

import base64
import contextlib
import os
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

from blockcache_runtime.errors import EngineError
from blockcache_runtime.serve import worker
from blockcache_runtime.serve.server import MOST_REFUSALS
from blockcache_runtime.serve.settings import KEY_VARIABLE, Settings
from blockcache_runtime.serve.wire import pack, unpack
from served_toy import ACTIONS, ToyPolicy, served, state

client = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def connected(server, **settings):
    return client.connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None, **settings)


def get(server, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def infer(connection, **given):
    connection.send(pack(given, bytes_keys=True))
    return connection.recv(timeout=20)


def counted(server, name):
    found = re.search(rf"^blockcache_{re.escape(name)} (\S+)$", get(server, "/metrics"), re.M)
    return float(found[1]) if found else 0.0


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


def test_a_client_of_openpi_byte_by_byte():
    with served() as server, connected(server) as connection:
        assert server.served.policy.sizes[:4] == [1] * 4, "the policy was not warmed up before the port opened"
        assert "ws://127.0.0.1" in server.said
        assert "this machine only" in server.said
        metadata = msgpack.unpackb(connection.recv(timeout=10))
        assert metadata["n_obs_steps"] == 2
        connection.send(
            msgpack.packb(
                {"state": {b"__ndarray__": True, b"data": struct.pack("<2f", 1, 0), b"dtype": "<f4", b"shape": [2]}}
            )
        )
        reply = msgpack.unpackb(connection.recv(timeout=10), strict_map_key=False)
        actions = reply["actions"]
        assert set(actions) == {b"__ndarray__", b"data", b"dtype", b"shape"}
        assert actions[b"dtype"] == "<f4"
        assert actions[b"shape"] == [ACTIONS, 3]
        assert struct.unpack("<3f", actions[b"data"][:12])[:2] == (1, 1)
        assert set(reply["server_timing"]) == {"infer_ms"}
        again = unpack(infer(connection, state=state(2)), 9)
        assert again["actions"][0, :2].tolist() == [1, 2]
        assert again["server_timing"]["prev_total_ms"] > 0


def test_a_client_of_vla_eval_byte_by_byte():
    def message(kind, payload, seq):
        return msgpack.packb({"type": kind, "payload": payload, "seq": seq, "timestamp": time.time()})

    array = {"__ndarray__": True, "data": struct.pack("<2f", 5, 0), "dtype": "<f4", "shape": [2]}
    with served(protocol="vla-eval") as server, connected(server) as connection:
        connection.send(message("hello", {"harness_version": "0.8.0", "protocol_version": 1}, 1))
        assert msgpack.unpackb(connection.recv(timeout=10))["type"] == "hello"
        connection.send(message("episode_start", {"task": {"name": "x"}}, 2))
        for seq in range(3, 3 + ACTIONS + 1):
            connection.send(message("observation", {"state": array, "task_description": "push"}, seq))
            reply = msgpack.unpackb(connection.recv(timeout=10))
            assert reply["type"] == "action"
            assert reply["seq"] == seq
            assert set(reply["payload"]["actions"]) == {"__ndarray__", "data", "dtype", "shape"}
            assert reply["payload"]["actions"]["shape"] == [3]
        assert counted(server, "requests_total") == 2
        connection.send(message("observation", {}, 100))
        reply = msgpack.unpackb(connection.recv(timeout=10))
        assert reply["type"] == "error"
        assert reply["seq"] == 100
        assert "'state'" in reply["payload"]["error"]


def test_health_and_metrics():
    with served() as server:
        assert get(server, "/healthz") == "OK\n"
        assert get(server, "/health") == '{"status": "ok"}\n'
        with connected(server) as connection:
            connection.recv(timeout=10)
            infer(connection, state=state(1))
            infer(connection, nothing=1)
            text = get(server, "/metrics")
        for line in (
            "blockcache_connections 1",
            "blockcache_waiting 0",
            "blockcache_requests_total 1",
            'blockcache_refused_total{reason="ObservationError"} 1',
            'blockcache_request_seconds_bucket{le="+Inf"} 1',
            "blockcache_policy_seconds_count 1",
            "# TYPE blockcache_policy_seconds histogram",
        ):
            assert line in text.splitlines(), text


def test_metrics_tell_what_was_recorded_and_what_was_lost(tmp_path):
    with served(record=str(tmp_path / "log")) as server, connected(server) as connection:
        connection.recv(timeout=10)
        infer(connection, state=state(1))
        server._log.dropped = 3
        assert counted(server, "recorded_total") == 1
        assert counted(server, "dropped_total") == 3
        server._log._forms = {}  # as if another client's had another form
        assert unpack(infer(connection, state=state(2)), 9)["actions"][0, 1] == 2
        assert counted(server, "dropped_total") == 4


def test_one_client_s_mistake_is_told_to_that_client_and_the_others_go_on():
    with served() as server, connected(server) as one, connected(server) as other:
        one.recv(timeout=10), other.recv(timeout=10)
        reply = infer(one, state=np.zeros(5))
        assert isinstance(reply, str)
        assert reply.count("\n") == 0
        assert "expected (2,)" in reply
        assert unpack(infer(other, state=state(2)), 9)["actions"].shape == (ACTIONS, 3)
        assert unpack(infer(one, state=state(3)), 9)["actions"][0, 0] == 3, "the connection does not go on"


def test_who_is_refused_too_often_is_disconnected():
    with served() as server, connected(server) as connection:
        connection.recv(timeout=10)
        replies = 0
        with contextlib.suppress(ConnectionClosed):
            while replies < 100:
                assert "expected an array" in infer(connection, state="no")
                replies += 1
        assert replies == MOST_REFUSALS


def test_the_policy_s_own_failure_is_one_sentence_and_spares_the_others():
    policy = ToyPolicy(seconds=0.05)
    policy.failing = True
    with served(policy) as server:
        server._worker.batch = 8
        answers = {}

        def ask(value):
            with connected(server) as connection:
                connection.recv(timeout=10)
                answers[value] = [infer(connection, state=state(value)) for _ in range(3)]

        threads = [threading.Thread(target=ask, args=(value,)) for value in (11, 12, 13, 14)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert max(policy.sizes) > 1, "no batch of several clients was made"
        for value, found in answers.items():
            for reply in found:
                if value == 13:
                    assert reply == "the policy failed (ValueError: thirteen)"
                else:
                    assert unpack(reply, 9)["actions"][0, 1] == value


@pytest.mark.parametrize(("once", "each", "batch"), [(0.004, 0.0, 8), (0.0, 0.02, 1)])
def test_batches_are_used_where_they_are_faster(monkeypatch, once, each, batch):
    """By the test's clock: seconds of a run, and more for each that is answered."""
    clock = {"now": 0.0}

    class Timed(ToyPolicy):
        def predict(self, observations, generators):
            clock["now"] += once + each * len(observations)
            return super().predict(observations, generators)

    monkeypatch.setattr(worker, "time", SimpleNamespace(**{**vars(time), "perf_counter": lambda: clock["now"]}))
    with served(Timed()) as server:
        assert server._worker.batch == batch
        assert ("8 clients in one run" in server.said) == (batch == 8)


@pytest.mark.parametrize("kind", ["Api-Key", "Bearer", "Basic"])
def test_a_key_is_needed_where_one_is_set(monkeypatch, kind):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    sent = base64.b64encode(f"any:{KEY}".encode()).decode() if kind == "Basic" else KEY
    with served() as server:
        assert get(server, "/healthz") == "OK\n"
        for headers in ({}, {"Authorization": f"{kind} wrong"}, {"Authorization": sent}, {"Authorization": kind}):
            with pytest.raises(InvalidStatus) as refused:
                connected(server, additional_headers=headers)
            assert refused.value.response.status_code == 401
            with pytest.raises(urllib.error.HTTPError):
                get(server, "/metrics", **headers)
        with connected(server, additional_headers={"Authorization": f"{kind} {sent}"}) as connection:
            connection.recv(timeout=10)
            assert unpack(infer(connection, state=state(1)), 9)["actions"].shape == (ACTIONS, 3)
        assert 'reason="key"} 8' in get(server, "/metrics", Authorization=f"{kind} {sent}")


def test_other_machines_are_served_with_a_key_only(monkeypatch):
    for host in ("0.0.0.0", "192.168.1.5", "::", "robot.local"):
        with pytest.raises(EngineError, match=f"set {KEY_VARIABLE}"), served(host=host):
            pass
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(EngineError, match="5 characters"), served():
        pass
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with served(host="0.0.0.0") as server:
        assert "everybody in that network who has the key" in server.said


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000},
        {"connections": 0},
        {"rate": 0.0},
        {"patience": float("nan")},
        {"rename": ("a",)},
        {"replan": -1},
    ],
)
def test_settings_that_make_no_sense(settings):
    with pytest.raises(EngineError):
        Settings(**settings)


def test_no_page_in_a_browser_may_connect():
    with served() as server, pytest.raises(InvalidStatus) as refused:
        connected(server, origin="http://127.0.0.1")
    assert refused.value.response.status_code == 403


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        from blockcache_runtime.serve.server import serve

        with pytest.raises(EngineError, match=f"cannot listen at 127.0.0.1:{port}: .*; take another --port"):
            serve(ToyPolicy(), Settings(port=port))


def test_no_more_connections_than_allowed():
    with served(connections=2) as server, connected(server), connected(server):
        until(lambda: counted(server, "connections") == 2)
        with pytest.raises(InvalidStatus) as refused:
            connected(server)
        assert refused.value.response.status_code == 503
    with served(connections=1) as server:
        for _ in range(5):
            with connected(server):
                pass
            until(lambda: counted(server, "connections") == 0)


def test_a_message_that_is_too_large_ends_the_connection():
    with served() as server, connected(server) as connection:
        connection.recv(timeout=10)
        with pytest.raises(ConnectionClosed) as closed:
            infer(connection, state=state(1), more=bytes(server.served.most_bytes))
        assert closed.value.rcvd.code == 1009


def test_who_asks_too_often_waits():
    with served(rate=50.0) as server, connected(server) as connection:
        connection.recv(timeout=10)
        started = time.monotonic()
        for _ in range(30):
            infer(connection, state=state(1))
        assert time.monotonic() - started >= (30 - 6) / 50  # a tenth of a second may be made up for


class WordyPolicy(ToyPolicy):
    """Its answers fill the buffers of a connection."""

    def predict(self, observations, generators):
        return [np.zeros((ACTIONS, 200_000), np.float32) for _ in observations]


def raw_connection(server, receive_bytes=None):
    """A websocket whose frames are written by hand."""
    raw = socket.socket()
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(20)
    raw.connect(("127.0.0.1", server.port))
    key = base64.b64encode(os.urandom(16)).decode()
    raw.sendall(
        f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert raw.recv(12).endswith(b"101")
    return raw


def frame(payload, opcode=2, last=True, masked=True, length=None):
    size = len(payload) if length is None else length
    head = bytes([(0x80 if last else 0) | opcode, (0x80 if masked else 0) | 127]) + struct.pack(">Q", size)
    return head + (bytes(4) if masked else b"") + payload


def test_a_client_that_never_reads_is_dropped_and_the_others_go_on():
    with served(WordyPolicy(), patience=0.5) as server:
        with contextlib.closing(raw_connection(server, 4096)) as raw:
            for _ in range(20):
                raw.sendall(frame(pack({"state": state(1)}, bytes_keys=True)))
            with connected(server) as other:
                other.recv(timeout=10)
                assert unpack(infer(other, state=state(1)), 9)["actions"].shape[0] == ACTIONS
            until(lambda: counted(server, 'refused_total{reason="unread"}') == 1)
        until(lambda: counted(server, "connections") == 0)


def test_a_client_that_never_ends_its_frame_is_dropped_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr("blockcache_runtime.serve.server.PING_SECONDS", 0.3)
    with served() as server, contextlib.closing(raw_connection(server)) as raw:
        raw.sendall(frame(b"\x81", length=1000))
        with connected(server) as other:
            other.recv(timeout=10)
            assert unpack(infer(other, state=state(1)), 9)["actions"].shape == (ACTIONS, 3)
        until(lambda: counted(server, "connections") == 0)


def test_a_handshake_that_never_ends_is_dropped(monkeypatch):
    monkeypatch.setattr("blockcache_runtime.serve.server.OPEN_SECONDS", 0.3)
    with served() as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(10)
        raw.sendall(b"GET / HTTP/1.1\r\nHost:")
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(1000):
                pass


def test_frames_that_break_the_rules_of_websockets_cost_only_their_own_connection():
    rng = np.random.default_rng(0)
    with served() as server, connected(server) as good:
        good.recv(timeout=10)
        for _ in range(60):
            with contextlib.closing(raw_connection(server)) as raw:
                content = rng.bytes(int(rng.integers(0, 300)))
                odd = frame(content, int(rng.integers(16)), bool(rng.integers(2)), bool(rng.integers(4)))
                with contextlib.suppress(OSError):
                    raw.sendall(odd if rng.integers(2) else content)
        assert unpack(infer(good, state=state(4)), 9)["actions"][0, 1] == 4
        until(lambda: counted(server, "connections") == 1)


def test_stopping_finishes_the_request_that_is_under_way():
    policy = ToyPolicy(seconds=0.0)
    with served(policy) as server, connected(server) as connection, connected(server) as idle:
        connection.recv(timeout=10), idle.recv(timeout=10)
        policy.seconds, warm = 0.5, len(policy.seen)
        connection.send(pack({"state": state(7)}, bytes_keys=True))
        until(lambda: len(policy.seen) > warm)
        server.loop.call_soon_threadsafe(server.stop.set)
        assert unpack(connection.recv(timeout=10), 9)["actions"][0, 1] == 7
        for one in (connection, idle):
            with pytest.raises(ConnectionClosed) as closed:
                one.recv(timeout=10)
            assert closed.value.rcvd.code == 1001


def test_stopping_does_not_wait_for_ever_for_what_is_under_way(monkeypatch):
    monkeypatch.setattr("blockcache_runtime.serve.server.GRACE_SECONDS", 0.2)
    policy = ToyPolicy()
    with served(policy) as server, connected(server) as connection:
        connection.recv(timeout=10)
        policy.seconds, warm = 2.0, len(policy.seen)
        connection.send(pack({"state": state(7)}, bytes_keys=True))
        until(lambda: len(policy.seen) > warm)
        server.loop.call_soon_threadsafe(server.stop.set)
        started = time.monotonic()
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=10)
        assert time.monotonic() - started < 1.5


@pytest.mark.parametrize("path", ["/healthz", "/health"])
def test_health_is_that_of_the_policy(path):
    def said():
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server, path)
        assert refused.value.code == 503
        return refused.value.read().decode()

    policy = ToyPolicy()
    with served(policy, patience=0.2) as server, connected(server) as connection:
        connection.recv(timeout=10)
        policy.seconds = 1.0
        assert "no action within 0.2 s" in infer(connection, state=state(1))
        assert "busy with one run" in said()
        until(lambda: server._worker.trouble(0.2) is None)
        assert "ok" in get(server, path).lower()
        server._worker._queue.put(None)
        until(lambda: server._worker._running.done())
        assert "thread of the policy has ended" in said()


def test_a_server_that_is_started_again_at_the_same_port_goes_on():
    with served() as server, connected(server) as connection:
        connection.recv(timeout=10)
        infer(connection, state=state(1))
        port = server.port
    with pytest.raises(ConnectionClosed):
        infer(connection, state=state(1))
    from blockcache_runtime.serve.server import Server

    made = Server.__init__

    def at_the_same_port(self, policy, settings):
        made(self, policy, Settings(port=port))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "__init__", at_the_same_port)
        with served() as server, connected(server) as connection:
            assert server.port == port
            connection.recv(timeout=10)
            assert unpack(infer(connection, state=state(2)), 9)["actions"][0, 1] == 2


def test_the_system_clock_set_back_changes_nothing(monkeypatch):
    with served() as server, connected(server) as connection:
        connection.recv(timeout=10)
        infer(connection, state=state(1))
        monkeypatch.setattr(time, "time", lambda: -1e9)
        reply = unpack(infer(connection, state=state(2)), 9)
        assert reply["actions"][0, :2].tolist() == [1, 2]
        assert reply["server_timing"]["prev_total_ms"] > 0


def test_clients_are_served_in_turn():
    policy = ToyPolicy()
    with served(policy) as server:
        policy.seconds, server._worker.batch = 0.02, 1
        answered = []

        def ask(value):
            with connected(server) as connection:
                connection.recv(timeout=10)
                for _ in range(10):
                    infer(connection, state=state(value))
                    answered.append(value)

        threads = [threading.Thread(target=ask, args=(value,)) for value in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    counts = {value: answered[:15].count(value) for value in (1, 2, 3)}
    assert min(counts.values()) >= 3, counts


def test_too_long_a_queue_is_said():
    policy = ToyPolicy()
    with served(policy, patience=0.2) as server, connected(server) as connection:
        connection.recv(timeout=10)
        policy.seconds = 0.5
        assert "no action within 0.2 s" in infer(connection, state=state(1))
