"""Packages for Intel's physicalai and model cards: the graph acts as the export does, and the card's three lines run."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import yaml

import blockcache as bc
from blockcache.engines.physicalai import _names, write_package
from blockcache.errors import EngineError
from blockcache.models.loading import save_policy
from blockcache_runtime import ExportedPolicy, open_export
from engine_comparison import BLOCKS
from image_policies import image_policy

PHYSICALAI = os.environ.get("BLOCKCACHE_PHYSICALAI", sys.executable)
"""A Python that has physicalai and onnxruntime."""


@pytest.mark.parametrize("cameras", [False, True])
def test_the_package_acts_as_the_export_does(make_policy, tmp_path, cameras):
    bc.export_policy(image_policy() if cameras else make_policy(), None, tmp_path / "policy.onnx")
    manifest, graph = write_package(tmp_path / "policy.onnx", tmp_path, "mine")
    said = json.loads(manifest.read_text())
    assert (said["format"], said["version"], said["policy"]["name"]) == ("policy_package", "1.0", "mine")
    assert said["model"]["runner"] == {"type": "single_pass"}
    assert said["model"]["artifacts"] == {"onnx": graph.name}
    assert said["model"]["n_obs_steps"] == 2
    session, opened = onnxruntime.InferenceSession(graph), open_export(tmp_path / "policy.onnx", threads=1)
    taken = {item.name: item.shape for item in session.get_inputs()}
    features = [item["init_args"] for item in said["model"]["input_features"]]
    assert taken == {item["name"]: [1, *item["shape"]] for item in features}
    assert list(taken) == (["images", "state"] if cameras else ["state"])
    rng = np.random.default_rng(0)
    feed = {name: rng.random(shape, dtype=np.float32) for name, shape in taken.items()}
    obs = dict(zip(opened.inputs, feed.values(), strict=True))
    drawn = []
    for _ in range(2):
        action, noise = session.run(["action", "noise"], feed)
        # noise that nobody seeds, robot units, random weights: rounding up to 2.5e-5, where another graph differs by 1
        np.testing.assert_allclose(action, opened.predict_action(obs, noise=noise)["action"], atol=2e-4)
        drawn.append(noise)
    assert np.abs(drawn[0] - drawn[1]).max() > 0.1  # drawn anew
    assert 0.7 < np.std(drawn) < 1.3
    (wrong,) = session.run(["action"], {name: value * np.float32(3e37) for name, value in feed.items()})
    assert np.isnan(wrong).all()


def test_a_chunk_before_is_not_part_of_it(policy, tmp_path):
    bc.export_policy(policy, None, tmp_path / "policy.onnx", rtc=True)
    with pytest.raises(EngineError, match="export it without --rtc"):
        write_package(tmp_path / "policy.onnx", tmp_path, "mine")


def test_two_inputs_of_one_name_are_refused():
    inputs = {"left.rgb": (2, 3, 8, 8), "right.rgb": (2, 3, 8, 8), "arm": (2, 5)}
    policy = SimpleNamespace(inputs=inputs, cameras=("left.rgb", "right.rgb"), timeless=frozenset())
    with pytest.raises(EngineError, match=r"two inputs the same \(left\.rgb -> images\.rgb, right"):
        _names(policy)


@pytest.mark.parametrize("guard", ["count", "full"])
def test_a_guard_is_not_part_of_it(policy, tmp_path, guard):
    """Its graph would be incomplete with "full", and silent with "count"."""
    seen = np.random.default_rng(0).normal(size=(64, 2, 5)).astype(np.float32)
    schedule = bc.Schedule(6, dict.fromkeys(BLOCKS, (0, 3)))
    bc.export_policy(policy, schedule, tmp_path / "policy.onnx", guard=guard, observations=seen)
    with pytest.raises(EngineError, match="has no guard; export it without --guard"):
        write_package(tmp_path / "policy.onnx", tmp_path, "mine")


def front_matter(text):
    _, matter, rest = text.split("---\n", 2)
    return yaml.safe_load(matter), rest


def test_the_card_s_three_lines_run(policy, tmp_path, monkeypatch, blockcache, command):
    monkeypatch.chdir(tmp_path)
    save_policy(policy, "my_policy")
    assert "leave out --output" in command("export", "my_policy", "--card", "handover", "-o", "other.onnx")[2]
    blockcache("export", "my_policy", "--card", "handover", "--with-reference", "2", "--license", "mit")
    assert sorted(os.listdir("handover")) == ["README.md", "policy.onnx", "policy.reference.npz"]
    matter, text = front_matter((tmp_path / "handover/README.md").read_text())
    assert (matter["license"], matter["pipeline_tag"], matter["library_name"]) == ("mit", "robotics", "blockcache")
    assert "The file agrees with its policy: 2 observations" in text
    assert "Sampler: ddpm, 6 steps" in text
    assert "Not tuned" in text
    lines = re.search(r"```python\n(.*?)\n```", text, re.DOTALL)[1]
    assert len(lines.splitlines()) == 3
    monkeypatch.chdir(tmp_path / "handover")
    names = {"observation": np.zeros(5)}
    exec(lines, names)
    assert names["actions"].shape == (4, 3)
    assert "every block is computed at every step" in text
    assert "Takes `obs` (2 x 5); gives 4 actions of 3 numbers." in text


@pytest.mark.parametrize("cameras", [False, True])
def test_the_verb_writes_a_package_that_physicalai_runs(make_policy, tmp_path, monkeypatch, command, cameras):
    monkeypatch.chdir(tmp_path)
    policy = image_policy() if cameras else make_policy()
    save_policy(policy, "my_policy")
    for words in ([], ["--card", "package", "--guard", "count"]):
        code, _, error = command("export", "my_policy", "--manifest", "physicalai", *words)
        assert (code, "--manifest needs --card DIR, and leaves out" in error) == (2, True)
    assert command("export", "my_policy", "--card", "package", "--manifest", "physicalai")[0] == 0
    assert sorted(os.listdir("package")) == ["README.md", "manifest.json", "my_policy.onnx"]
    text = front_matter((tmp_path / "package/README.md").read_text())[1]
    lines = re.search(r"```python\n(.*?)\n```", text, re.DOTALL)[1]
    assert len(lines.splitlines()) == 3
    assert ("Takes `images` (2 x 3 x 44 x 76), `state` (2 x 2);" if cameras else "Takes `state` (2 x 5);") in text
    there = subprocess.run([PHYSICALAI, "-c", "import physicalai.inference"], capture_output=True, check=False)
    if there.returncode:
        pytest.skip("physicalai is not installed; BLOCKCACHE_PHYSICALAI may name a Python that has it")
    code = f"""
import numpy as np
from physicalai.inference.manifest import Manifest

assert Manifest.load("manifest.json").model.n_obs_steps == 2
observation = dict(np.load("../seen.npz"))
{lines}
np.savez("../there.npz", **policy(observation))
print(actions.shape)
"""
    bc.export_policy(policy, None, "policy.onnx")
    opened, rng = ExportedPolicy("policy.onnx", 1), np.random.default_rng(0)
    seen = {name: rng.random((1, *shape), dtype=np.float32) for name, shape in opened.inputs.items()}
    np.savez("seen.npz", **dict(zip(("images", "state") if cameras else ("state",), seen.values(), strict=True)))
    ran = subprocess.run([PHYSICALAI, "-c", code], capture_output=True, text=True, cwd="package", check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "(4, 3)"
    there = np.load("there.npz")
    expected = opened.predict_action(seen, noise=there["noise"])["action"]
    np.testing.assert_allclose(there["action"], expected, atol=1e-5)
