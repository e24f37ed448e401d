"""The example that a robot runs: blockcache_runtime over numpy and onnxruntime, nothing else."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.samplers import DDPM
from image_policies import image_policy
from repository import ROOT

EXAMPLE = ROOT / "examples" / "deploy_onnx.py"

# stands in front of every import; what the example itself and its two libraries do not need cannot be imported
GUARDED = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(f"{{name}} is not on the robot")

sys.meta_path.insert(0, Refuse())
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert {{"numpy", "onnxruntime"}} <= loaded
assert not loaded & set({refused!r}), loaded
"""
REFUSED = ("torch", "onnx", "diffusers", "scipy", "safetensors", "click", "rich", "tqdm")


@pytest.fixture
def exported(make_policy, random_updates, tmp_path):
    policy = make_policy(sampler=DDPM(num_inference_steps=6))
    names = [f"layers.{index}.{kind}" for index in (0, 1) for kind in ("SA", "CA", "FFN")]
    schedule = bc.Schedule(6, random_updates(names, 6))
    bc.export_policy(policy, schedule, tmp_path / "policy.onnx")
    return policy, schedule, tmp_path / "policy.onnx"


def run(argv, refused, cwd):
    code = GUARDED.format(refused=refused, argv=[str(EXAMPLE), *argv])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.mark.parametrize("named", [True, False], ids=["path given", "policy.onnx here"])
def test_deployment_needs_numpy_and_onnxruntime_only(exported, named, tmp_path):
    policy, schedule, path = exported
    done = run([str(path)] if named else [], REFUSED, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"chunk {index}" for index in range(5)]
    assert all("4 actions in" in line for line in lines)
    # and its numbers are the policy's own, under the same schedule and noise, where a ramp rises by 0.1 an action
    rng = np.random.default_rng(0)
    with bc.accelerate(policy, schedule, engine="patched"):
        for chunk, line in enumerate(lines):
            noise = torch.from_numpy(rng.standard_normal((6, 1, 6, 3), dtype=np.float32))
            seen = torch.tensor([max(0.0, 0.4 * chunk - 0.1), 0.4 * chunk])
            expected = policy.predict_action(seen[None, :, None].expand(1, 2, 5), noise=noise)["action"][0, 0]
            printed = [float(number) for number in re.findall(r"-?\d+\.\d*", line.split("the first is")[1])]
            np.testing.assert_allclose(printed, expected, atol=0.006)


def test_it_runs_a_camera_policy_too(tmp_path):
    policy = image_policy()
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    done = run([str(tmp_path / "policy.onnx")], REFUSED, tmp_path)
    assert done.returncode == 0, done.stderr
    rng = np.random.default_rng(0)
    for chunk, line in enumerate(done.stdout.splitlines()):
        noise = torch.from_numpy(rng.standard_normal((6, 1, 6, 3), dtype=np.float32))
        moved = torch.tensor([max(0, 4 * chunk - 1), 4 * chunk])
        frames = moved.to(torch.uint8)[None, :, None, None, None].expand(1, 2, 3, 44, 76)
        seen = {"image": frames, "hand": 0.1 * moved[None, :, None].expand(1, 2, 2)}
        expected = policy.predict_action(seen, noise=noise)["action"][0, 0]
        printed = [float(number) for number in re.findall(r"-?\d+\.\d*", line.split("the first is")[1])]
        np.testing.assert_allclose(printed, expected, atol=0.006)


def test_the_refusal_works(exported, tmp_path):
    """Or the test above could not fail."""
    done = run([str(exported[2])], ("numpy",), tmp_path)
    assert done.returncode != 0
    assert "numpy is not on the robot" in done.stderr


def test_the_control_loop_that_never_waits_needs_numpy_and_onnxruntime_only(exported, tmp_path):
    code = GUARDED.format(refused=REFUSED, argv=[str(EXAMPLE.with_name("robot_loop.py")), str(exported[2])])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counters, wall, own = done.stdout.splitlines()
    assert counters.startswith("ticks 60, waiting ")
    assert "calls, wall: p50 " in wall
    assert "calls, own processor time: p50 " in own


def test_the_load_on_a_server_is_measured_without_errors(exported):
    pytest.importorskip("websockets", reason="websockets is not installed")
    words = [str(exported[2]), "--clients", "2", "--minutes", "0.03"]
    command = [sys.executable, EXAMPLE.with_name("serve_load.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said, first, second, last = done.stdout.splitlines()
    assert said.startswith("serving policy.onnx")
    for place, line in enumerate((first, second)):
        assert int(re.match(rf"client {place}: (\d+) requests, p50 ", line)[1]) > 3
    assert last.startswith("0 errors []; memory ")
