"""Families besides DP-T, trained by the same run: they learn, a kill leaves no trace, what does not fit is refused."""

import json

import numpy as np
import pytest
import torch

import training_tasks
from blockcache.errors import BlockcacheError, PolicyError
from blockcache.models.rdt import RDTPolicy
from blockcache.models.sources import load_policy
from blockcache.training import TrainConfig, TrainingError, loop, train
from blockcache.training.data import read_demonstrations
from blockcache.training.run import TrainingRun

SIZES = {"layers": 2, "heads": 2, "horizon": 4, "n_action_steps": 2, "batch": 16, "warmup": 10}
LONG = {"epochs": 80, "lr": 1e-2}
FAMILIES = ["rdt"]


@pytest.fixture(autouse=True)
def _tasks(monkeypatch):
    training_tasks.register(monkeypatch)


def tiny(name, **changes):
    return {
        "rdt": lambda: TrainConfig("tokens", family="rdt", **{"width": 16, "epochs": 2, **SIZES, **changes}),
    }[name]()


def demonstrated(config, path, **changes):
    make = training_tasks.token_demos if config.task == "tokens" else training_tasks.row_demos
    np.savez(path, **make(**changes))
    return path


@pytest.fixture
def fit(tmp_path):
    """Trains a config on the demonstrations of its task."""

    def run(config, name="policy", **how):
        return train(
            config, demonstrated(config, tmp_path / "demos.npz"), tmp_path / name, threads=1, progress=False, **how
        )

    return run


def begun(config, path, **changes):
    torch.manual_seed(config.seed)
    return TrainingRun.begin(config, read_demonstrations(config.spec, demonstrated(config, path, **changes)), {}, "")


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


# --- what comes out -------------------------------------------------------------------------------------------------


def first_loss(config, path):
    run = begun(config, path)
    torch.manual_seed(0)
    rows = torch.arange(len(run.train))
    with torch.no_grad():
        return run.loss(run.policy, run.train, rows, run.objective.spread(rows * 37)).item()


def test_rdt_learns_to_do_what_an_image_token_shows(fit, tmp_path):
    config = tiny("rdt", **LONG)
    policy = load_policy(fit(config))
    assert isinstance(policy, RDTPolicy)
    assert (policy.config.task, policy.config.sampler.num_inference_steps) == ("tokens", 20)
    record = policy.config.training
    assert (record["loss"], record["steps"], record["windows"]) == ("sample MSE", 160, 32)  # 4 episodes of 8 steps
    assert record["training_loss"] < 0.5 * first_loss(config, tmp_path / "demos.npz")
    steps = kept_steps(config, tmp_path / "demos.npz")
    demos = training_tasks.token_demos()
    obs = {name: torch.tensor(demos[name][steps], dtype=torch.float32) for name in config.spec.inputs}
    for name in ("state_tokens", "action_mask"):
        obs[name] = obs[name][:, None]
    done = policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action"]
    assert done.shape == (len(steps), 2, 3)
    wanted = torch.tensor(demos["action"][steps, :2], dtype=torch.float32)[:, None]
    assert (done[..., :2] - wanted).abs().max() < 0.15
    assert (done[..., 2] == 0).all()  # not the robot's


def kept_steps(config, path):
    """The steps of all episodes but the one that is held out."""
    from blockcache.training.data import split

    kept, _ = split(read_demonstrations(config.spec, path))
    return np.concatenate([np.arange(*episode) for episode in kept])


def test_rdt_begins_without_an_output_and_with_places_apart(tmp_path):
    run = begun(tiny("rdt"), tmp_path / "demos.npz")
    model = run.policy.denoiser.model
    assert (model.final_layer.ffn_final.fc2.weight == 0).all()
    places = model.x_pos_embed[0]
    assert places.shape == (3 + 4, 16)
    assert torch.cdist(places, places).fill_diagonal_(9.0).min() > 0.5
    steps = run.train.obs
    assert steps.shape == (32,)  # each begins a window, also the last of an episode
    torch.testing.assert_close(run.train.action[7, :, :2], run.train.action[7, :1, :2].expand(4, -1))


def test_what_is_not_the_robots_does_not_count(tmp_path):
    run = begun(tiny("rdt"), tmp_path / "demos.npz")
    assert (run.train.action[..., 2] == 0).all()
    rows, t = torch.arange(8), torch.full((8,), 500)
    torch.manual_seed(1)
    before = run.loss(run.policy, run.train, rows, t)
    with torch.no_grad():
        run.policy.denoiser.model.final_layer.ffn_final.fc2.bias[2] = 100.0
    torch.manual_seed(1)
    torch.testing.assert_close(run.loss(run.policy, run.train, rows, t), before)
    torch.testing.assert_close(before, run.train.action[rows, :, :2].square().mean())  # it begins by saying 0
    whole = begun(tiny("rdt"), tmp_path / "whole.npz", action_mask=np.ones((40, 3)))
    assert whole.train.counted is None
    assert (whole.train.action[..., 2] == 7).all()


# --- killed and resumed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_killed_and_resumed_run_ends_in_the_same_bits(fit, monkeypatch, name):
    whole = fit(tiny(name), "whole")
    step = TrainingRun.step

    def killed(self):
        if self.progress.step == 3:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "SAVE_SECONDS", -1.0)
        patch.setattr(TrainingRun, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(tiny(name), "killed")
    assert weights(fit(tiny(name), "killed")) == weights(whole)


def test_a_state_of_another_family_is_refused(fit):
    fit(tiny("rdt"))
    with pytest.raises(
        BlockcacheError, match=r"policy\.state\.safetensors are not this run's; remove it to start anew"
    ):
        fit(TrainConfig("row", width=16, epochs=2, **SIZES))


def test_an_older_run_is_told_apart_by_what_it_was_then():
    assert "family" not in TrainConfig("row").to_dict()
    assert tiny("rdt").to_dict()["family"] == "rdt"


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "row", "family": "pi0"}, "family 'pi0' cannot be trained; known families are dpt, rdt"),
        ({"task": "row", "family": "rdt"}, r"needs observations state_tokens \(2,\), .*; task 'row' shows obs \(4,\)"),
        ({"task": "tokens", "family": "rdt", "n_obs_steps": 2}, "sees one moment: n_obs_steps must be 1, got 2"),
        ({"task": "tokens", "family": "rdt", "trunk": 16}, "an rdt policy has no trunk, got 16"),
        ({"task": "tokens"}, r"dpt policy sees one row of numbers, .* task 'tokens' shows state_tokens \(3,\)"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(TrainingError, match=message):
        TrainConfig(**settings)


def test_a_horizon_shorter_than_what_is_executed():
    assert (TrainConfig("tokens", family="rdt").horizon, TrainConfig("row").horizon) == (16, 10)
    with pytest.raises(PolicyError, match="the executed slice ends at 8, behind the horizon 4"):
        TrainConfig("tokens", family="rdt", horizon=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lang_tokens": np.zeros((40, 2, 3))}, r"\(40, 2, 3\) of float64, task 'tokens' needs \(steps, 2, 4\)"),
        ({"ctrl_freqs": np.zeros(40)}, r"\(40,\) of float64, task 'tokens' needs \(steps, 1\)"),
        ({"img_tokens": np.full((40, 3, 5), np.nan)}, "hold NaN or infinity"),
        ({"action_mask": np.full((40, 3), 0.5)}, "'action_mask' is a mask: expected 1 or 0"),
        ({"action_mask": np.zeros((40, 3))}, "hides every number of the actions"),
        ({"lang_attn_mask": np.zeros((40, 2))}, "hides all language tokens of a step"),
    ],
)
def test_demonstrations_that_do_not_fit(tmp_path, changes, message):
    with pytest.raises(TrainingError, match=message):
        begun(tiny("rdt"), tmp_path / "demos.npz", **changes)


# --- on the command line ----------------------------------------------------------------------------------------------


def test_the_verb_trains_a_family(blockcache, tmp_path):
    demonstrated(tiny("rdt"), tmp_path / "demos.npz")
    sizes = ["--width", "16", "--layers", "1", "--epochs", "1", "--horizon", "4", "--action-steps", "3"]
    blockcache(
        *("policy", "train", "tokens", "--family", "rdt", *sizes),
        *("--data", str(tmp_path / "demos.npz"), "-o", str(tmp_path / "policy")),
    )
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert {name: config[name] for name in ("family", "task", "horizon", "n_action_steps", "depth", "hidden_size")} == {
        "family": "rdt",
        "task": "tokens",
        "horizon": 4,
        "n_action_steps": 3,
        "depth": 1,
        "hidden_size": 16,
    }
