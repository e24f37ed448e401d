"""Training a camera policy: the encoder learns with the denoiser, and a kill leaves no trace."""

import numpy as np
import pytest
import torch

from blockcache.errors import FileError
from blockcache.models.loading import load_policy
from blockcache.tasks import task_spec
from blockcache_lab.training import TrainConfig, TrainingError, data, train
from blockcache_lab.training.run import TrainingRun

TINY = TrainConfig("pusht-image", width=16, layers=1, heads=2, epochs=2, batch=4, warmup=2, trunk=16)
STEPS = 24


@pytest.fixture
def demos(tmp_path, monkeypatch):
    """Four episodes of states; frames are not drawn but painted, so that no simulator is needed."""
    rng = np.random.default_rng(0)
    states = rng.uniform(50, 450, size=(STEPS, 5)).astype(np.float32)
    np.savez(tmp_path / "demos.npz", state=states, action=states[:, 2:4], episode_ends=np.arange(6, STEPS + 1, 6))
    monkeypatch.setattr("blockcache_lab.tasks.pusht_image.frames_of", painted)
    return tmp_path / "demos.npz"


def painted(states, spec):
    frames = np.full((len(states), 3, 96, 96), 255, dtype=np.uint8)
    for frame, state in zip(frames, states, strict=True):
        x, y = (state[2:4] / 512 * 96).astype(int)
        frame[:, max(0, y - 8) : y + 8, max(0, x - 8) : x + 8] = 90
    return frames


def fit(demos, out, **how):
    return train(TINY, demos, out, threads=1, progress=False, **how)


def test_the_encoder_learns_with_the_denoiser(demos, tmp_path):
    fit(demos, tmp_path / "policy")
    policy = load_policy(tmp_path / "policy")
    assert policy.config.encoder.crop == (76, 76)
    assert policy.config.encoder.width == 16
    assert policy.config.task == "pusht-image"
    torch.manual_seed(TINY.seed)
    fresh = type(policy)(TINY.policy_config())
    before, after = TINY.recipe.learnt(fresh), TINY.recipe.learnt(policy)
    assert list(before) == list(after)
    moved = {name: float((after[name] - before[name]).detach().abs().max()) for name in before}
    assert moved["obs_encoder.obs_nets.image.backbone.nets.0.weight"] > 0
    assert moved["obs_encoder.obs_nets.image.nets.3.weight"] > 0
    assert moved["head.weight"] > 0
    field = policy.normalizer.field("image")
    assert (field.scale.tolist(), field.offset.tolist()) == ([2.0], [-1.0])
    seen = {"image": torch.zeros(1, 2, 3, 96, 96, dtype=torch.uint8), "agent_pos": torch.full((1, 2, 2), 200.0)}
    assert policy.predict_action(seen)["action"].shape == (1, 8, 2)


def test_a_kill_leaves_no_trace(demos, tmp_path, monkeypatch):
    fit(demos, tmp_path / "whole")
    step = TrainingRun.step

    def killed(self):
        if self.progress.step == 4:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr("blockcache_lab.training.loop.SAVE_SECONDS", 0.0)
    monkeypatch.setattr(TrainingRun, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(demos, tmp_path / "resumed")
    monkeypatch.setattr(TrainingRun, "step", step)
    fit(demos, tmp_path / "resumed")
    whole, resumed = (load_policy(tmp_path / name).state_dict() for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_frames_of_a_file_are_taken_as_they_are(tmp_path, monkeypatch):
    """Another task's file has its inputs by name."""
    spec = task_spec("pusht-image")
    arrays = {
        "image": np.zeros((4, 3, 96, 96), dtype=np.uint8),
        "agent_pos": np.zeros((4, 2)),
        "action": np.zeros((4, 2)),
    }
    monkeypatch.setattr(data, "_OBSERVATIONS", {})
    np.savez(tmp_path / "right.npz", **arrays, episode_ends=[2, 4])
    found = data.read_demonstrations(spec, tmp_path / "right.npz")
    assert {name: array.shape for name, array in found.obs.items()} == {"image": (4, 3, 96, 96), "agent_pos": (4, 2)}
    np.savez(tmp_path / "wrong.npz", **arrays | {"image": arrays["image"].astype(np.float32)}, episode_ends=[2, 4])
    with pytest.raises(
        TrainingError, match=r"frames 'image' in .* float32, task 'pusht-image' needs \(steps, 3, 96, 96\) of uint8"
    ):
        data.read_demonstrations(spec, tmp_path / "wrong.npz")
    del arrays["image"]
    np.savez(tmp_path / "without.npz", **arrays, episode_ends=[2, 4])
    with pytest.raises(FileError, match="lack the array 'image'"):
        data.read_demonstrations(spec, tmp_path / "without.npz")


def test_a_trunk_needs_cameras():
    with pytest.raises(TrainingError, match="task 'pusht' has no cameras"):
        TrainConfig("pusht", trunk=16)
    assert "trunk" not in TrainConfig("pusht").to_dict()
    assert TINY.to_dict()["trunk"] == 16
    assert TrainConfig("pusht-image").policy_config().encoder.width == 64
