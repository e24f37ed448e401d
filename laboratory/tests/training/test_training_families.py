"""Families besides DP-T, trained by the same run: they learn, a kill leaves no trace, what does not fit is refused."""

import json

import numpy as np
import pytest
import torch

import training_tasks
from blockcache.errors import FileError, PolicyError
from blockcache.models.dit.policy import DiTPolicy
from blockcache.models.loading import load_policy, save_policy
from blockcache.models.normalizer import ShiftedField
from blockcache.models.rdt.policy import RDTPolicy, public_sampler
from blockcache.samplers import DDPM, Euler, table
from blockcache_lab.cli.training import train as train_verb
from blockcache_lab.training import TrainConfig, TrainingError, loop, train
from blockcache_lab.training.config import RECIPES
from blockcache_lab.training.data import read_demonstrations, split
from blockcache_lab.training.objective import objective_of
from blockcache_lab.training.run import TrainingRun

SIZES = {"layers": 2, "heads": 2, "horizon": 4, "n_action_steps": 2, "batch": 8, "warmup": 10}
LONG = {"epochs": 300, "lr": 1e-2, "width": 32, "batch": 28}
FAMILIES = ["rdt", "dit-ddpm", "dit-flow"]


@pytest.fixture(autouse=True)
def _tasks(monkeypatch):
    training_tasks.register(monkeypatch)


def tiny(name, **changes):
    """A run of "rdt", "dit-ddpm" or "dit-flow" that is over in no time."""
    family, _, objective = name.partition("-")
    settings = {"width": 16, "epochs": 2, **SIZES, **changes}
    return TrainConfig("toy-rdt" if family == "rdt" else "row", family=family, objective=objective or None, **settings)


def demonstrated(config, path, **changes):
    make = training_tasks.token_demos if config.task == "toy-rdt" else training_tasks.row_demos
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
    return TrainingRun(
        config, read_demonstrations(config.spec, demonstrated(config, path, **changes)), {"data_sha256": ""}, ""
    )


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


# --- what comes out -------------------------------------------------------------------------------------------------


def learned(config, path):
    """A run driven to its end, without saving after every epoch; how much of the loss is left; what is seen and done in the
    episodes that are not held out."""
    run = begun(config, path)
    before = whole_loss(run)
    while run.progress.step < run.total:
        run.step()
    kept, _ = split(read_demonstrations(config.spec, path))
    steps = np.concatenate([np.arange(*episode) for episode in kept])
    with np.load(path) as file:
        seen = {name: torch.tensor(file[name][steps], dtype=torch.float32) for name in config.spec.shapes}
        return run, whole_loss(run) / before, seen, torch.tensor(file["action"][steps], dtype=torch.float32)


def whole_loss(run):
    """Of the averaged weights, over all windows, at times from the whole range."""
    torch.manual_seed(0)
    rows = torch.arange(len(run.train))
    with torch.no_grad():
        return run.loss(run.average, run.train, rows, run.objective.spread(rows * 37)).item()


def saved(run, place):
    save_policy(run.result(), place)
    return load_policy(place)


def test_rdt_learns_to_do_what_an_image_token_shows(tmp_path):
    run, left, seen, wanted = learned(tiny("rdt", **LONG | {"epochs": 160}), tmp_path / "demos.npz")
    policy = saved(run, tmp_path / "policy")
    assert isinstance(policy, RDTPolicy)
    assert (policy.config.task, policy.config.sampler.num_inference_steps) == ("toy-rdt", 20)
    record = policy.config.training
    assert (record["loss"], record["steps"], record["windows"]) == ("sample MSE", 160, 32)  # 4 episodes of 8 steps
    assert left < 0.01
    rolled_out = {name: value[:, None] for name, value in seen.items()}
    done = policy.predict_action(rolled_out, generator=torch.Generator().manual_seed(0))["action"]
    assert done.shape == (32, 2, 4)
    assert (done[..., :3] - wanted[:, None, :3]).abs().max() < 0.05  # of -0.8 to 0.8
    assert (done[..., 3] == 0).all()  # not the robot's


@pytest.mark.parametrize(
    ("name", "predicts", "sampler"),
    [("dit-ddpm", "epsilon MSE", DDPM()), ("dit-flow", "velocity MSE", Euler(num_inference_steps=10))],
)
def test_a_dit_learns_what_its_sampler_asks_for(tmp_path, name, predicts, sampler):
    run, left, seen, wanted = learned(tiny(name, **LONG), tmp_path / "demos.npz")
    policy = saved(run, tmp_path / "policy")
    assert isinstance(policy, DiTPolicy)
    assert (policy.config.task, policy.config.weights, policy.config.sampler) == ("row", "ema", sampler)
    assert (policy.config.training["loss"], policy.config.training["steps"]) == (predicts, 300)
    assert left < 0.1
    obs = seen["obs"][:, None].expand(-1, 2, -1)
    done = policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action"]
    assert done.shape == (32, 2, 2)
    assert (done - wanted[:, None]).abs().max() < 2  # of -5 to 15


@pytest.mark.parametrize("sampler", [DDPM(), public_sampler(20), Euler(num_inference_steps=10)], ids=lambda s: s.type)
def test_a_denoiser_that_says_the_target_leads_to_the_clean_sample(sampler):
    """What is learnt is what the sampler takes the output for, at every one of its times."""
    objective, steps = objective_of(sampler), table(sampler)
    clean, noise = torch.randn(2, 3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k, time in enumerate(steps.timesteps):
        t = torch.full((3,), time, dtype=torch.float64 if isinstance(sampler, Euler) else torch.int64)
        x, out, at = objective.mix(clean, noise, t), objective.target(clean, noise), steps.at(k)
        torch.testing.assert_close(at.x0_x * x + at.x0_out * out, clean, rtol=0, atol=1e-4)


def test_a_sampler_that_no_objective_is_known_of():
    with pytest.raises(TrainingError, match=r"or the velocity of a flow, got the sampler .*v_pred"):
        objective_of(DDPM(prediction_type="v_prediction"))


def test_a_dit_begins_with_closed_gates(tmp_path):
    run = begun(tiny("dit-ddpm"), tmp_path / "demos.npz")
    blocks = run.policy.noise_predictor.transformer_blocks
    assert all((block.adaLN_modulation[1].weight == 0).all() for block in blocks)
    noisy, t = torch.randn(5, 4, 2), torch.arange(5)
    with torch.no_grad():
        unchanged = run.policy.noise_predictor.output_proj(run.policy.noise_predictor.input_proj(noisy))
        torch.testing.assert_close(run.policy.noise_predictor(noisy, t, run.train.obs[:5]), unchanged)
    assert run.train.obs.shape == (28, 8)  # conditioning vectors, of two moments
    assert run.train.action.shape == (28, 4, 2)
    assert (run.train.action.amin(), run.train.action.amax()) == (pytest.approx(-1), pytest.approx(1))


def test_a_number_that_never_changes_is_normalised_to_0():
    field = ShiftedField(2)
    field.fit(torch.tensor([[1.0, 7.0], [3.0, 7.0]]))
    torch.testing.assert_close(field.normalize(torch.tensor([2.0, 7.0])), torch.zeros(2))
    torch.testing.assert_close(field.unnormalize(torch.tensor([1.0, 0.25])), torch.tensor([3.0, 7.25]))


def test_rdt_begins_without_an_output_and_with_places_apart(tmp_path):
    run = begun(tiny("rdt"), tmp_path / "demos.npz")
    model = run.policy.denoiser.model
    assert (model.final_layer.ffn_final.fc2.weight == 0).all()
    places = model.x_pos_embed[0]
    assert places.shape == (3 + 4, 16)
    assert torch.cdist(places, places).fill_diagonal_(9.0).min() > 0.5
    steps = run.train.obs
    assert steps.shape == (32,)  # each begins a window, also the last of an episode
    torch.testing.assert_close(run.train.action[7], run.train.action[7, :1].expand(4, -1))


def test_what_is_not_the_robots_does_not_count(tmp_path):
    run = begun(tiny("rdt"), tmp_path / "demos.npz")
    assert (run.train.action[..., 3] == 0).all()
    rows, t = torch.arange(8), torch.full((8,), 500)
    torch.manual_seed(1)
    before = run.loss(run.policy, run.train, rows, t)
    with torch.no_grad():
        run.policy.denoiser.model.final_layer.ffn_final.fc2.bias[3] = 100.0
    torch.manual_seed(1)
    torch.testing.assert_close(run.loss(run.policy, run.train, rows, t), before)
    torch.testing.assert_close(before, run.train.action[rows, :, :3].square().mean())  # it begins by saying 0
    whole = begun(tiny("rdt"), tmp_path / "whole.npz", action_mask=np.ones((40, 4)))
    assert whole.train.counted is None
    assert (whole.train.action[..., 3] == 7).all()


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


def test_a_state_of_another_family_or_objective_is_refused(fit):
    out = fit(tiny("dit-ddpm"))
    before = weights(out)
    for other in (TrainConfig("row", width=16, epochs=2, **SIZES), tiny("rdt")):
        with pytest.raises(FileError, match=r"policy\.state\.safetensors are not this run's; remove it to start anew"):
            fit(other)
    with pytest.raises(TrainingError, match=r"another run: objective 'ddpm' \(now 'flow'\)"):
        fit(tiny("dit-flow"))
    assert weights(out) == before


def test_an_older_run_is_told_apart_by_what_it_was_then():
    assert not {"family", "objective"} & TrainConfig("row").to_dict().keys()
    assert tiny("rdt").to_dict()["family"] == "rdt"
    assert tiny("dit-flow").to_dict()["objective"] == "flow"


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "row", "family": "pi0"}, "family 'pi0' cannot be trained; known families are dpt, rdt, dit"),
        ({"task": "row", "family": "rdt"}, r"needs observations state_tokens \(2,\), .*; task 'row' shows obs \(4,\)"),
        ({"task": "toy-rdt", "family": "rdt", "n_obs_steps": 2}, "sees one moment: n_obs_steps must be 1, got 2"),
        (
            {"task": "toy-rdt", "family": "rdt", "trunk": 16},
            "task 'toy-rdt' has no cameras, so there is no trunk to set; got 16",
        ),
        ({"task": "toy-rdt"}, r"dpt policy sees one row of numbers, .* task 'toy-rdt' shows state_tokens \(4,\)"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(TrainingError, match=message):
        TrainConfig(**settings)


def test_a_horizon_shorter_than_what_is_executed():
    assert (TrainConfig("toy-rdt", family="rdt").horizon, TrainConfig("row").horizon) == (16, 10)
    with pytest.raises(PolicyError, match="the executed slice ends at 8, behind the horizon 4"):
        TrainConfig("toy-rdt", family="rdt", horizon=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lang_tokens": np.zeros((40, 5, 3))}, r"\(40, 5, 3\) of float64, task 'toy-rdt' needs \(steps, 5, 7\)"),
        ({"ctrl_freqs": np.zeros(40)}, r"\(40,\) of float64, task 'toy-rdt' needs \(steps, 1\)"),
        ({"img_tokens": np.full((40, 10, 9), np.nan)}, "hold NaN or infinity"),
        ({"action_mask": np.full((40, 4), 0.5)}, "'action_mask' is a mask: expected 1 or 0"),
        ({"action_mask": np.zeros((40, 4))}, "hides every number of the actions"),
        ({"lang_attn_mask": np.zeros((40, 5))}, "hides all language tokens of a step"),
    ],
)
def test_demonstrations_that_do_not_fit(tmp_path, changes, message):
    with pytest.raises(TrainingError, match=message):
        begun(tiny("rdt"), tmp_path / "demos.npz", **changes)


# --- on the command line ----------------------------------------------------------------------------------------------


def test_the_verb_offers_what_there_are_recipes_for():
    options = {option.name: option for option in train_verb.params}
    assert list(options["family"].type.choices) == list(RECIPES)
    assert tuple(options["objective"].type.choices) == RECIPES["dit"].objectives


def words(tmp_path, name, *more):
    demonstrated(tiny(name), tmp_path / "demos.npz")
    family, _, _ = name.partition("-")
    sizes = [
        "--width",
        "16",
        "--layers",
        "1",
        "--epochs",
        "1",
        "--horizon",
        "6",
        "--action-steps",
        "3",
        "--threads",
        "1",
    ]
    files = ["--data", tmp_path / "demos.npz", "-o", tmp_path / "policy"]
    return ["policy", "train", tiny(name).task, "--family", family, *files, *sizes, *more]


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("rdt", [], {"family": "rdt", "task": "toy-rdt", "depth": 1, "hidden_size": 16}),
        ("dit-flow", ["--objective", "flow"], {"family": "dit", "task": "row", "num_layers": 1, "hidden_dim": 16}),
    ],
)
def test_the_verb_trains_a_family(blockcache, tmp_path, name, more, expected):
    blockcache(*words(tmp_path, name, *more))
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    wanted = expected | {"horizon": 6, "n_action_steps": 3}
    assert {setting: config[setting] for setting in wanted} == wanted
    assert config["sampler"]["type"] == ("dpmsolver++" if name == "rdt" else "euler")


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("rdt", ["--trunk", "16"], "has no cameras"),
        ("rdt", ["--objective", "flow"], "of family rdt must be none"),
        ("dit", ["--family", "pi0"], "'pi0' is not one of 'dpt', 'rdt', 'dit'"),
        ("dit", ["--family", "rdt"], "an rdt policy needs observations"),
    ],
)
def test_the_verb_refuses_in_one_sentence(refused, tmp_path, name, more, message):
    assert message in refused(*words(tmp_path, name, *more))
    assert not (tmp_path / "policy").exists()
