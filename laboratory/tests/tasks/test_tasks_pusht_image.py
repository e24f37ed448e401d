"""Push-T through a camera: frames show the state, and a camera policy goes all the way from simulator to robot file."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny_policy

import blockcache as bc
from blockcache.compare.evaluation import prepare
from blockcache.errors import ObservationError, TaskError
from blockcache.models.dpt.encoder import EncoderConfig, Input
from blockcache.models.loading import save_policy
from blockcache.models.registry import port_of
from blockcache.observations import load_observations
from blockcache.samplers import DDPM
from blockcache.tasks import TaskSpec, make_task, rollout, task_spec
from blockcache_lab.studies.suite_runs import shortened
from blockcache_runtime import History, open_export
from image_policies import image_policy, observed

pytest.importorskip("gym_pusht")
SPEC = task_spec("pusht-image")
STATE = np.array([100.0, 400.0, 300.0, 150.0, 0.5])
ENCODER = EncoderConfig(
    (Input("image", (3, 96, 96)), Input("agent_pos", (2,))), (76, 76), width=16, keypoints=4, features=4
)


@pytest.fixture
def task():
    task = make_task("pusht-image")
    yield task
    task.close()


def camera_policy(**changes):
    """A tiny policy with the task's inputs and a random encoder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"obs_dim": ENCODER.size, "action_dim": 2, "horizon": 10, "n_action_steps": 8, "encoder": ENCODER}
        made = image_policy()  # its weights are large enough for blocks to matter
        policy = type(made)(
            replace(made.config, **sizes, task="pusht-image", sampler=DDPM(num_inference_steps=4), **changes)
        )
        for parameter in policy.model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        policy.normalizer.action.fit(torch.tensor([[0.0, 0.0], [512.0, 512.0]]))
        policy.normalizer.field("agent_pos").fit(torch.tensor([[0.0, 0.0], [512.0, 512.0]]))
    return policy.eval()


def test_a_frame_shows_the_state(task):
    seen = task.set_state(STATE)
    assert (seen["image"].dtype, seen["image"].shape) == (np.uint8, (3, 96, 96))
    np.testing.assert_allclose(seen["agent_pos"], STATE[:2], atol=1e-3)
    column, row = (STATE[:2] / 512 * 96).astype(int)
    red, green, blue = seen["image"][:, row, column].astype(int)
    assert blue > 200 > green > red  # the agent is royal blue
    np.testing.assert_array_equal(seen["image"][:, 90, 90], [255, 255, 255])
    there = task.frame_of(STATE)
    assert np.abs(there.astype(int) - seen["image"]).mean() < 0.2
    task._env.obs_type = "pixels"
    np.testing.assert_array_equal(np.moveaxis(there, 0, -1), task._env.get_obs())  # gym-pusht's own
    moved = task.frame_of(STATE + np.eye(5)[0] * 50)
    assert (moved[:, row, column] == 255).all()


def test_the_same_seed_shows_the_same_film(task):
    def film(seed):
        frames = [task.reset(seed)]
        for target in np.random.default_rng(0).uniform(100, 400, size=(6, 2)):
            task.step(target)
            frames.append(task.observe())
        return frames

    one, again, other = film(3), film(3), film(4)
    for name in SPEC.shapes:
        assert all(np.array_equal(a[name], b[name]) for a, b in zip(one, again, strict=True))
        assert not np.array_equal(one[0][name], other[0][name])
    assert task.render().shape == (680, 680, 3)


def test_rollouts_hand_frames_over_as_they_are():
    fed = []

    def act(obs, chunk):
        fed.append(obs)
        return np.full((2, 4, 2), 256.0)

    records = rollout(
        lambda: shortened(lambda: make_task("pusht-image"), 6), act, [1, 2], n_obs_steps=2, n_action_steps=4
    )
    assert [record.steps for record in records] == [6, 6]
    assert {name: (array.dtype, array.shape) for name, array in fed[0].items()} == {
        "image": (np.uint8, (2, 2, 3, 96, 96)),
        "agent_pos": (np.float32, (2, 2, 2)),
    }
    np.testing.assert_array_equal(fed[0]["image"][:, 0], fed[0]["image"][:, 1])
    assert not np.array_equal(fed[1]["image"][:, 0], fed[1]["image"][:, 1])


class Blind:
    """Shows something else than its task says."""

    def __init__(self, shown):
        self.spec, self.shown, self.done, self.score, self.success = SPEC, shown, False, 0.0, False

    def reset(self, seed):
        return self.shown

    def close(self):
        pass


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (
            {"image": np.zeros((96, 96, 3), dtype=np.uint8), "agent_pos": np.zeros(2)},
            r"'image' is uint8 of \(96, 96, 3\), exp",
        ),
        ({"image": np.zeros((3, 96, 96)), "agent_pos": np.zeros(2)}, r"float64 of \(3, 96, 96\), expected uint8"),
        ({"image": np.zeros((3, 96, 96), dtype=np.uint8), "agent_pos": np.full(2, np.nan)}, "holds NaN"),
        ({"agent_pos": np.zeros(2)}, "KeyError"),
    ],
)
def test_a_simulator_that_shows_something_else_fails_by_itself(shown, said):
    (record,) = rollout(
        lambda: Blind(shown), lambda obs, chunk: np.zeros((1, 4, 2)), [0], n_obs_steps=2, n_action_steps=4
    )
    assert record.score is None
    assert re.search(said, record.error)


def test_a_spec_says_one_kind_of_observation():
    facts = {"name": "toy", "action_dim": 1, "max_steps": 1, "success": "", "extra": ""}
    for wrong in ({"obs_dim": 0}, {"obs_dim": 3, "inputs": {"arm": (2,)}}, {"obs_dim": 3, "cameras": ("eye",)}):
        with pytest.raises(TaskError, match="must say its obs_dim, or be 0 there and name its inputs"):
            TaskSpec(**facts, **wrong)
    assert "inputs" not in TaskSpec(**facts, obs_dim=3).describe()
    assert json.loads(json.dumps(SPEC.describe()))["inputs"] == {"image": [3, 96, 96], "agent_pos": [2]}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda: tiny_policy(), "it takes obs, the task gives image, agent_pos"),
        (lambda: image_policy(), "it takes image, hand, the task gives image, agent_pos"),
        (lambda: _with_frames(84), r"its 'image' inputs have \(3, 84, 84\) numbers, the task's \(3, 96, 96\)"),
    ],
)
def test_a_policy_that_does_not_fit_the_task_is_refused(policy, said, tmp_path):
    with pytest.raises(TaskError, match=said):
        prepare(policy(), "pusht-image", (), observed(batch=9), state=tmp_path, progress=False)


def _with_frames(side):
    encoder = replace(ENCODER, inputs=(Input("image", (3, side, side)), Input("agent_pos", (2,))))
    made = camera_policy()
    return type(made)(replace(made.config, encoder=encoder)).eval()


def test_from_the_simulator_to_a_robot_s_file(blockcache, refused, in_an_empty_directory, tmp_path):
    """Render, encode, calibrate, accelerate, check, export, roll out: by the verbs that a user types."""
    save_policy(camera_policy(), tmp_path / "policy")
    said = blockcache("policy", "observe", "policy", "--episodes", 1, "--count", 24, "-o", "seen.npz")
    assert "24 observations of 1 episodes" in said
    seen = load_observations("seen.npz")
    assert {name: (str(array.dtype), array.shape) for name, array in seen.items()} == {
        "image": ("uint8", (24, 2, 3, 96, 96)),
        "agent_pos": ("float32", (24, 2, 2)),
        "moments": ("int64", (24, 2)),
    }
    blockcache("calibrate", "policy", "--observations", "seen.npz", "--generations", 4, "-o", "recording.safetensors")
    blockcache("solve", "recording.safetensors", "-S", 2, "-n", 1, "-o", "schedule.json")
    blockcache("export", "policy", "schedule.json", "-o", "policy.onnx")
    robot, history = open_export("policy.onnx", threads=1), History(2)
    task = make_task("pusht-image")
    given = history.push(task.reset(5))
    noise = robot.draw_noise(1, np.random.default_rng(0))
    found = robot.predict_action(given, noise=noise)["action"]
    policy = bc.load_policy("policy")
    with bc.accelerate(policy, bc.Schedule.load("schedule.json"), "patched"):
        expected = policy.predict_action(given, noise=torch.from_numpy(noise))["action"]
    scale = port_of(policy).action_scale
    assert np.abs((found - expected.numpy()) * scale).max() < 1e-5
    task.close()
    blockcache(
        "eval",
        "policy",
        "-m",
        "bac:S=2,n=1",
        "--observations",
        "seen.npz",
        "--rollouts",
        1,
        "--generations",
        4,
        "-o",
        "results.json",
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert {record["method"] for record in results["records"]} >= {"full"}
    assert all(record["error"] is None for record in results["records"])
    np.savez("wrong.npz", image=np.moveaxis(seen["image"], 2, -1), agent_pos=seen["agent_pos"])
    assert "channels come before height and width" in refused("calibrate", "policy", "--observations", "wrong.npz")
    np.savez("wrong.npz", agent_pos=seen["agent_pos"])
    assert "expected an array 'image' of shape (N, 2, 3, 96, 96)" in refused(
        "calibrate", "policy", "--observations", "wrong.npz"
    )


def test_an_observation_of_another_kind_is_refused_by_the_policy():
    with pytest.raises(ObservationError, match=r"is a mapping of arrays, expected 'image' \(batch, 2, 3, 96, 96\)"):
        camera_policy().predict_action([np.zeros(3)])
