"""docs/your-policy.md by sections, on a checkpoint and a policy object made here; LeRobot's section is in test_lerobot."""

import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import blockcache as bc
from pages import FENCE, fenced, lines, section
from public_policy import config, write_checkpoint
from repository import ROOT

PAGE = "docs/your-policy.md"
CHECKPOINT = section(PAGE, "## A Diffusion Policy checkpoint")
QUICK = {
    "observe": ["--episodes", 1, "--count", 30],
    "calibrate": ["--generations", 1],
    "check": ["--count", 4, "--samples", 4],
}


@pytest.fixture
def script(in_an_empty_directory):
    """What a user of the public code has: a checkpoint, the policy in a script, and the authors' schedules."""
    policy = write_checkpoint("latest.ckpt", config(n_emb=16, n_layer=2))
    for layer in range(2):
        for dropout in (1, 2, 3):
            module = f"decoder.layers.{layer}.dropout{dropout}"
            place = Path("optimal_steps/cosine") / module
            place.mkdir(parents=True)
            (place / f"optimal_steps_{module}_10_cosine.pkl").write_bytes(pickle.dumps([0, 30, 60 + dropout]))
    return {"policy": policy, "obs_dict": {"obs": torch.rand(1, 2, 20)}}


def test_every_command_and_line_for_a_checkpoint_works(script, blockcache):
    typed = 0
    for language, code in FENCE.findall(CHECKPOINT):
        if language == "python":
            exec(compile(code, "page", "exec"), script)
        for line in lines(code) if language == "sh" else ():
            program, *words = shlex.split(line)
            typed += 1
            if program == "python":
                subprocess.run([sys.executable, ROOT / words[0], *words[1:]], check=True, capture_output=True)
            else:
                verb = words[1] if words[0] == "policy" else words[0]
                assert blockcache(*words, *QUICK.get(verb, []))
    assert typed == 10
    for made in ("my_policy/config.json", "policy.onnx", "schedule.json", "theirs.onnx"):
        assert Path(made).exists()
    assert script["action"].shape == (1, 8, 2)


def test_the_script_runs_accelerated_with_a_schedule_of_the_converted_policy(script, blockcache):
    """The fingerprint of the object and of what was made of its file is the same."""
    converted = bc.load_policy("latest.ckpt")
    schedule = bc.solve(bc.calibrate(converted, [script["obs_dict"]["obs"]], progress=False), updates=10, union=5)
    with bc.accelerate(script["policy"], schedule) as fast:
        assert fast.engine == "onnx"
        assert fast.stats().notes == ()


def test_a_module_s_function_is_a_policy(in_an_empty_directory, tmp_path, monkeypatch, blockcache):
    code, *_ = fenced(section(PAGE, "## module:function"), "python")
    Path("my_robot.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    np.savez("observations.npz", obs=512 * np.random.default_rng(0).random((2, 2, 20)))
    *_, calibrate = lines("\n".join(fenced(section(PAGE, "## module:function"), "sh")))
    assert blockcache(*shlex.split(calibrate)[1:], "--generations", 1)
    assert Path("recording.safetensors").exists()
    sys.modules.pop("my_robot", None)


def test_the_camera_policy_of_the_page_runs(exports_stay_here):
    names = {}
    for code in fenced(section(PAGE, "## Cameras"), "python"):
        exec(compile(code, "page", "exec"), names)
    assert names["same"].shape == names["plain"].shape
