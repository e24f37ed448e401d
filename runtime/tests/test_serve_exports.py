"""An export behind the server, as a process: the same actions as in this one, records, signals, public clients."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest

import blockcache as bc
from blockcache.observations import load_observations
from blockcache_runtime import History, open_export
from blockcache_runtime.__main__ import main
from blockcache_runtime.serve.wire import pack, unpack

client = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")

CLIENTS = os.environ.get("BLOCKCACHE_CLIENTS", sys.executable)
"""A Python that has openpi-client and vla-eval: `pip install --no-deps openpi-client vla-eval`, with what they import."""


class Process:
    def __init__(self, *words, port=0):
        command = [
            sys.executable,
            "-m",
            "blockcache_runtime",
            "serve",
            *map(str, words),
            "--port",
            str(port),
            "--threads",
            "1",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = self.process.stdout.readline()
        self.port = int(re.search(r":(\d+) ", self.said)[1])

    def __enter__(self):
        return self

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        code = self.process.wait(30)
        return code, self.process.stderr.read()

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


def expected(path, seed, observations, replan):
    """The actions of the same episode in this process."""
    policy, found = open_export(path, threads=1), []
    history, generator = History(policy.n_obs_steps), np.random.default_rng(seed)
    for step, one in enumerate(observations):
        seen = history.push(one)
        if step % replan == 0:
            chunk = policy.predict_action(seen, generator=generator)["action"][0]
        found.append(chunk[step % replan])
    return np.array(found)


def episode(seed, steps=9):
    return np.random.default_rng(100 + seed).uniform(-1, 1, (steps, 5)).astype(np.float32)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_process_serves_the_same_actions_records_them_and_ends_when_told(export, tmp_path, how):
    with Process(export, "--record", tmp_path / "log") as server:
        with client.connect(f"ws://127.0.0.1:{server.port}", compression=None) as connection:
            n = unpack(connection.recv(timeout=20), 9)["n_action_steps"]
            for seed in range(3):
                found = []
                for step, one in enumerate(episode(seed)):
                    words = {"reset": True, "seed": seed} if step == 0 else {"observe_only": step % n != 0}
                    connection.send(pack({"obs": one, **words}, bytes_keys=True))
                    reply = unpack(connection.recv(timeout=20), 9)
                    found += [*reply["actions"][:n]] if "actions" in reply else []
                assert np.array_equal(found[:9], expected(export, seed, episode(seed), n))
        assert server.end(how) == (0, "")
    kept = load_observations(tmp_path / "log")
    chunks = -(-9 // n)
    assert kept["obs"].shape == (3 * chunks, 2, 5)
    assert sorted(kept["moments"].tolist()) == [[e, p] for e in range(3) for p in range(chunks)]


def test_an_export_that_is_replaced_is_served_as_it_was(export, policy):
    with Process(export) as server, client.connect(f"ws://127.0.0.1:{server.port}") as connection:
        connection.recv(timeout=20)

        def ask():
            connection.send(pack({"obs": episode(0)[0], "reset": True, "seed": 1}, bytes_keys=True))
            return unpack(connection.recv(timeout=20), 9)["actions"]

        before = ask()
        export.write_bytes(b"something else")
        assert np.array_equal(ask(), before)
        export.unlink()
        assert np.array_equal(ask(), before)


def test_what_cannot_be_served_is_one_line(tmp_path, capsys, export):
    for words, said in (
        (["none.onnx"], "no ONNX file at none.onnx"),
        ([str(export), "--rename", "x"], "--rename takes THEIRS=OURS"),
        ([str(export), "--host", "0.0.0.0"], "set BLOCKCACHE_API_KEY"),
        ([str(export), "--replan", "99"], "replan is 1 to"),
    ):
        assert main(["serve", *words, "--port", "0", "--threads", "1"]) == 2
        found = capsys.readouterr().err
        assert found.startswith("error: ")
        assert said in found
        assert found.count("\n") == 1


def test_without_the_extra_one_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr("blockcache_runtime.__main__.find_spec", lambda name: None)
    assert main(["serve", "policy.onnx"]) == 2
    assert "serving needs websockets" in capsys.readouterr().err


OPENPI = """
import sys, numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
policy, found = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1])), []
n = policy.get_server_metadata()["n_action_steps"]
for seed in range(20):
    seen = np.random.default_rng(100 + seed).uniform(-1, 1, (9, 5)).astype(np.float32)
    for step, one in enumerate(seen):
        words = {"reset": True, "seed": seed} if step == 0 else {"observe_only": step % n != 0}
        reply = policy.infer({"obs": one, **words})
        if "actions" in reply:
            chunk = reply["actions"]
        found.append(chunk[step % n])
np.save(sys.argv[2], found)
"""
VLA_EVAL = """
import sys, anyio, numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.connection import Connection
from vla_eval.runners.sync_runner import SyncEpisodeRunner

class Replay(StepBenchmark):
    found = []
    def get_tasks(self): return [{"name": "replay", "seed": seed} for seed in range(20)]
    def reset(self, task):
        self.seen = np.random.default_rng(100 + task["seed"]).uniform(-1, 1, (9, 5)).astype(np.float32)
        self.at = 0
        return self.seen[0]
    def step(self, action):
        self.found.append(action["actions"])
        self.at += 1
        return StepResult(self.seen[self.at % 9], 0.0, self.at == 9, {})
    def make_obs(self, raw, task): return {"obs": raw, "task_description": "replay"}
    def get_step_result(self, result): return {"success": True}

async def main():
    benchmark = Replay()
    async with Connection(f"ws://127.0.0.1:{sys.argv[1]}") as connection:
        for task in benchmark.get_tasks():
            await SyncEpisodeRunner().run_episode(benchmark, task, connection, max_steps=9)
    np.save(sys.argv[2], benchmark.found)

anyio.run(main)
"""


@pytest.mark.parametrize(
    ("protocol", "package", "program"), [("openpi", "openpi_client", OPENPI), ("vla-eval", "vla_eval", VLA_EVAL)]
)
def test_public_clients_as_they_are_get_the_same_actions_as_in_process(export, tmp_path, protocol, package, program):
    if sys.executable == CLIENTS and not find_spec(package):
        pytest.skip(f"{package} is not installed; BLOCKCACHE_CLIENTS may name a Python that has it")
    with Process(export, "--protocol", protocol) as server:
        command = [CLIENTS, "-c", program, str(server.port), str(tmp_path / "found.npy")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    n = open_export(export, threads=1).n_action_steps
    wanted = np.concatenate([expected(export, seed, episode(seed), n) for seed in range(20)])
    assert np.array_equal(np.load(tmp_path / "found.npy"), wanted)


def test_the_server_goes_on_after_a_client_was_killed(export):
    with Process(export) as server:
        program = OPENPI.replace("range(20)", "range(10**6)")
        if sys.executable == CLIENTS and not find_spec("openpi_client"):
            pytest.skip("openpi_client is not installed; BLOCKCACHE_CLIENTS may name a Python that has it")
        killed = subprocess.Popen([CLIENTS, "-c", program, str(server.port), "x"])
        time.sleep(2)
        killed.kill()
        killed.wait()
        with client.connect(f"ws://127.0.0.1:{server.port}") as connection:
            assert unpack(connection.recv(timeout=20), 9)["n_obs_steps"] == 2


GOES_ON = """
import sys, time, numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
policy, lost, answered = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1])), 0, 0
while not lost or answered < 20:
    try:
        policy = policy or WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]))
        policy.infer({"obs": np.zeros(5, np.float32)})
        answered += 1
        print("answered", flush=True)
    except Exception:  # this client connects once: whoever uses it makes another
        policy, lost, answered = None, lost + 1, 0
    time.sleep(0.05)
"""


def test_a_public_client_goes_on_with_a_server_that_was_killed_and_started_again(export):
    if sys.executable == CLIENTS and not find_spec("openpi_client"):
        pytest.skip("openpi_client is not installed; BLOCKCACHE_CLIENTS may name a Python that has it")
    with Process(export) as server:
        user = subprocess.Popen([CLIENTS, "-c", GOES_ON, str(server.port)], stdout=subprocess.PIPE, text=True)
        assert user.stdout.readline() == "answered\n"
        server.end(signal.SIGKILL)
    with Process(export, port=server.port):
        assert user.communicate(timeout=60)[0].count("answered") >= 20
    assert user.returncode == 0


def test_the_verb_serves_a_policy_as_well_as_an_export(policy, monkeypatch):
    """Behind its port, accelerated: the noise of a chunk has a seed that the connection's generator gives."""
    from blockcache.cli.serve import ServedPort
    from blockcache.models.registry import port_of
    from blockcache.models.sampling import generate

    port = port_of(policy)
    with bc.accelerate(policy, None, "loop"):
        served = ServedPort("toy", port)
        assert served.inputs == dict(port.inputs)
        assert served.action_dim == 3
        one = {name: np.zeros((1, *shape), np.float32) for name, shape in port.inputs.items()}
        (found,) = served.predict([one], [np.random.default_rng(4)])
        seed = int(np.random.default_rng(4).integers(2**62))
        wanted = port.action_of(generate(policy.predict_action, port.prepare_observation(one["obs"]), seed))
        assert np.array_equal(found, np.asarray(wanted[0]))


def test_what_runs_it_is_said_before_the_port_opens(export):
    with Process(export, "--provider", "CPUExecutionProvider") as server:
        code, said = server.end()
    assert code == 0
    assert "agrees with the CPU's answers: 4 observations" in said
    assert "CPUExecutionProvider runs" in said
