"""On a robot there are numpy and onnxruntime alone: an export runs, and so does the page that says how."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import blockcache as bc
import blockcache_runtime
from image_policies import image_policy
from repository import ROOT

README = ROOT / "runtime" / "README.md"
REFUSED = (
    "torch",
    "click",
    "blockcache",
    "blockcache_lab",
    "onnx",
    "safetensors",
    "scipy",
    "diffusers",
    "rich",
    "tqdm",
)

# stands in front of every import; nothing but the runtime and its two libraries can be imported, and nothing is fetched
GUARD = """
import socket, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(f"{{name}} is not on the robot")
def offline(*args, **settings):
    raise OSError("there is no network")
sys.meta_path.insert(0, Refuse())
sys.path[:0] = [{source!r}]
socket.socket.connect = socket.create_connection = socket.getaddrinfo = offline
"""
RUN = """
import json
import numpy as np
from blockcache_runtime import History, open_export
policy = open_export("policy.onnx", threads=1)
seen = History(policy.n_obs_steps).push(np.arange(5))
print(json.dumps(policy.predict_action(seen, seed=3)["action"].tolist()))
"""


def on_a_robot(program, place, refused=REFUSED):
    source = str(Path(blockcache_runtime.__file__).parent.parent)
    code = GUARD.format(refused=refused, source=source) + program
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=place)


@pytest.fixture
def robot(policy, schedule, tmp_path):
    """A directory with an export in it."""
    bc.export_policy(policy, schedule, tmp_path / "policy.onnx")
    return tmp_path


def test_an_export_runs_with_numpy_and_onnxruntime_alone(robot, policy, schedule):
    done = on_a_robot(RUN, robot)
    assert done.returncode == 0, done.stderr
    noise = np.random.default_rng(3).standard_normal((6, 1, 6, 3), dtype=np.float32)
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = policy.predict_action(torch.arange(5.0).expand(1, 2, 5), noise=torch.from_numpy(noise))["action"]
    np.testing.assert_allclose(json.loads(done.stdout), expected, atol=1e-5)


@pytest.mark.parametrize("name", [*REFUSED, "numpy"])
def test_what_is_refused_there_is_refused(robot, name):
    """Or the test above could not fail."""
    done = on_a_robot(f"import {name}", robot, (*REFUSED, "numpy"))
    assert f"ImportError: {name} is not on the robot" in done.stderr


def test_there_is_no_network_there(robot):
    done = on_a_robot("import socket\nsocket.create_connection(('127.0.0.1', 9))", robot)
    assert "OSError: there is no network" in done.stderr


@pytest.mark.parametrize("cameras", [False, True])
def test_the_program_of_the_page_runs(cameras, robot):
    if cameras:
        bc.export_policy(image_policy(), None, robot / "policy.onnx")
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    check = "\nassert actions.shape == (policy.n_action_steps, policy.action_dim), actions.shape\n"
    done = on_a_robot(program + check, robot)
    assert done.returncode == 0, done.stderr


def test_the_page_names_every_error():
    from blockcache_runtime import errors

    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"ContentError"}
    assert kinds == set(re.findall(r"`(?:blockcache_runtime\.errors\.)?(\w+Error)`", README.read_text()))


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            None,
            "an export needs onnxruntime, which is not installed; version 1.23 or newer comes with "
            "blockcache-runtime, which docs/start.md says how to install",
        ),
        ("1.22.1", "an export needs a newer onnxruntime than the installed 1.22.1; version 1.23 or newer comes with "),
    ],
)
def test_a_missing_or_old_onnxruntime_is_named(robot, found, sentence):
    change = "import sys, types\nsys.modules['onnxruntime'] = None\n"
    if found:
        change = f"import sys, types\nsys.modules['onnxruntime'] = types.SimpleNamespace(__version__={found!r})\n"
    done = on_a_robot(change + RUN, robot)
    assert f"blockcache_runtime.errors.EngineError: {sentence}" in done.stderr
