"""A camera policy that begins with what another one knows: an encoder that learns to tell numbers, then demonstrations."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.models.loading import load_policy, save_policy
from blockcache_lab.tasks.pusht_image import PushTImage
from blockcache_lab.training import TrainConfig, TrainingError, pretrain, train
from blockcache_lab.training.run import TrainingRun

pytest.importorskip("gym_pusht")
SIZES = {"n_layer": 1, "n_head": 2, "n_emb": 16, "horizon": 10, "n_obs_steps": 2, "n_action_steps": 8}
HOW = {"epochs": 2, "batch": 4, "lr": 1e-3, "trunk": 16, "warmup": 1}
AFTER = TrainConfig(
    "pusht-image", width=16, layers=1, heads=2, epochs=1, batch=4, warmup=1, trunk=16, crop=96, frozen=True
)


@pytest.fixture
def taught(tmp_path):
    torch.manual_seed(0)
    policy = DiffusionTransformerPolicy(DPTConfig(obs_dim=20, action_dim=2, task="pusht", **SIZES))
    policy.normalizer.obs.fit(torch.tensor([[0.0] * 20, [500.0] * 20]))
    policy.normalizer.action.fit(torch.tensor([[10.0, 20.0], [400.0, 500.0]]))
    save_policy(policy, tmp_path / "taught")
    return tmp_path / "taught"


@pytest.fixture
def demos(tmp_path):
    states = np.random.default_rng(0).uniform(100, 400, size=(24, 5)).astype(np.float32)
    np.savez(tmp_path / "demos.npz", state=states, action=states[:, 2:4], episode_ends=np.arange(6, 25, 6))
    return tmp_path / "demos.npz"


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch):
    monkeypatch.setattr("blockcache_lab.training.pretraining.EPOCH", 2)


def see(taught, out, task="pusht-image", **changes):
    return pretrain(task, taught, out, settings=HOW | changes, threads=1, progress=False)


def fit(demos, out, config=AFTER, **how):
    return train(config, demos, out, threads=1, progress=False, **how)


def test_the_denoiser_reads_features_as_it_read_the_numbers(taught, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(TrainingRun, "validate", lambda self: 0.0)
    result = TrainingRun.result
    monkeypatch.setattr(TrainingRun, "result", lambda self: runs.append(self) or result(self))
    policy, before = load_policy(see(taught, tmp_path / "seeing")), load_policy(taught)
    features = torch.rand(3, 66)
    told = runs[-1].average_read_out(features)
    torch.testing.assert_close(policy.model.cond_obs_emb(features), before.model.cond_obs_emb(told))
    kept = {name: value for name, value in before.model.state_dict().items() if "cond_obs_emb" not in name}
    assert all(torch.equal(policy.model.state_dict()[name], value) for name, value in kept.items())
    assert torch.equal(policy.normalizer.action.scale, before.normalizer.action.scale)
    assert policy.config.encoder.crop == (96, 96)
    assert (policy.config.task, policy.config.training["begins_with"]) == ("pusht-image", "taught")
    assert (policy.config.training["steps"], policy.config.training["validation_loss"] > 0) == (4, True)


def test_the_encoder_learns_to_tell(taught, tmp_path, monkeypatch):
    """Four scenes again and again: whoever looks at the frames can tell them apart, who does not is 90 pixels off."""
    scenes = np.random.default_rng(5).uniform((15, 15, 80, 80, -3), (497, 497, 430, 430, 3), size=(4, 5))
    monkeypatch.setattr(PushTImage, "random_states", lambda self, rng, count: np.resize(scenes, (count, 5)))
    monkeypatch.setattr("blockcache_lab.training.pretraining._VALIDATED", 4)
    policy = load_policy(see(taught, tmp_path / "seeing", epochs=30, lr=5e-3))
    assert policy.config.training["validation_loss"] < 25


def test_a_kill_leaves_no_trace(taught, tmp_path, monkeypatch):
    see(taught, tmp_path / "whole")
    step = TrainingRun.step

    def killed(self):
        if self.progress.step == 3:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(TrainingRun, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        see(taught, tmp_path / "resumed")
    monkeypatch.setattr(TrainingRun, "step", step)
    see(taught, tmp_path / "resumed")
    whole, resumed = (load_policy(tmp_path / name).state_dict() for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    with pytest.raises(TrainingError, match=r"another run: seed 0 \(now 1\)"):
        see(taught, tmp_path / "resumed", seed=1)


def test_training_goes_on_with_a_frozen_encoder(taught, demos, tmp_path):
    seeing = see(taught, tmp_path / "seeing")
    before, after = load_policy(seeing), load_policy(fit(demos, tmp_path / "policy", begin=seeing))
    for name, value in before.state_dict().items():
        same = torch.equal(value, after.state_dict()[name])
        assert same or name.startswith("model."), name  # the encoder and the normaliser are as they were
    assert not torch.equal(before.model.head.weight, after.model.head.weight)
    assert {"begins_with": "seeing", "frozen": True}.items() <= after.config.training.items()
    free = load_policy(fit(demos, tmp_path / "free", replace(AFTER, frozen=False), begin=seeing))
    first = "obs_encoder.obs_nets.image.backbone.nets.0.weight"
    assert not torch.equal(free.state_dict()[first], before.state_dict()[first])
    with pytest.raises(TrainingError, match="another run: begins_with 'seeing'"):
        fit(demos, tmp_path / "policy", begin=tmp_path / "free")


def test_features_of_a_frozen_encoder_are_those_of_the_policy(taught, demos, tmp_path):
    from blockcache_lab.training.data import read_demonstrations

    policy, shown = load_policy(see(taught, tmp_path / "seeing")), read_demonstrations(AFTER.spec, demos)
    frozen, free = (
        TrainingRun(replace(AFTER, frozen=how), shown, {"data_sha256": ""}, "", policy) for how in (True, False)
    )
    rows = torch.arange(4)
    torch.testing.assert_close(
        frozen.train.conditions(None, rows), free.train.conditions(policy, rows).detach(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 32}, r"n_emb 16 \(needed 32\)"),
        ({"crop": None}, r"encoder's crop \(96, 96\) \(needed \(76, 76\)\);"),
        ({"trunk": 32}, r"policy: encoder's width 16 \(needed 32\);"),
    ],
)
def test_a_beginning_of_other_sizes_is_refused(taught, demos, tmp_path, changes, said):
    seeing = see(taught, tmp_path / "seeing")
    with pytest.raises(TrainingError, match=f"cannot begin with that .*{said}"):
        fit(demos, tmp_path / "policy", replace(AFTER, **changes), begin=seeing)
    assert not (tmp_path / "policy").exists()


def test_what_makes_no_sense_is_refused(taught, demos, tmp_path):
    with pytest.raises(TrainingError, match="must have learnt before"):
        fit(demos, tmp_path / "policy")
    with pytest.raises(TrainingError, match="'pusht' has no cameras, so there is nothing to crop or to freeze"):
        TrainConfig("pusht", frozen=True)
    with pytest.raises(TrainingError, match="'pusht' cannot be drawn in any state; those that can: pusht-image"):
        see(taught, tmp_path / "seeing", task="pusht")
    with pytest.raises(TrainingError, match="multiple of 2, the policy's moments; got 3"):
        see(taught, tmp_path / "seeing", batch=3)
    config = json.loads((taught / "config.json").read_text())
    (taught / "config.json").write_text(json.dumps(config | {"task": "kitchen"}))
    with pytest.raises(TrainingError, match=r"learns what a dp-t policy of task 'pusht' sees, and .*taught is none"):
        see(taught, tmp_path / "seeing")


def test_the_verbs(taught, demos, tmp_path, command):
    settings = ("--trunk", 16, "--batch", 4, "--epochs", 1, "--threads", 1)
    code, out, _ = command("policy", "pretrain", "pusht-image", "--from", taught, "-o", tmp_path / "seeing", *settings)
    assert (code, "seeing" in out) == (0, True)
    code, _, said = command(
        "policy", "train", "pusht-image", "--data", demos, "-o", tmp_path / "policy", "--from", tmp_path / "seeing",
        "--frozen", "--crop", 96, "--layers", 1, *settings
    )  # fmt: skip
    assert code != 0
    assert "n_head 2 (needed 4), n_emb 16 (needed 256)" in said
