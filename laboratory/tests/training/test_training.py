"""The training recipe on toy demonstrations: windows, refusals, and above all a kill that leaves no trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import blockcache as bc
from blockcache.errors import BlockcacheError, FileError, PolicyError, TaskError
from blockcache.models.loading import load_policy
from blockcache.tasks import task_spec
from blockcache_lab.training import TrainConfig, TrainingError, loop, run, train
from blockcache_lab.training.data import read_demonstrations, window_indices

TINY = TrainConfig("pusht", width=16, layers=1, heads=2, epochs=3, batch=16, warmup=3)
STEPS = 12  # of TINY on the toy demonstrations: 4 in each of 3 epochs


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_demos(tmp_path / "demos.npz")


def write_demos(path: Path, **changes: Any) -> Path:
    """Six episodes of 16 steps: the action is the block's first keypoint, which hardly moves in an episode."""
    rng = np.random.default_rng(0)
    keypoint = rng.uniform(0, 500, size=(96, 9, 2)).astype(np.float32)
    keypoint[:, 0] = np.repeat(rng.uniform(0, 500, size=(6, 2)), 16, axis=0) + rng.normal(0, 5, size=(96, 2))
    state = rng.uniform(0, 500, size=(96, 5)).astype(np.float32)
    arrays: dict[str, Any] = {
        "keypoint": keypoint,
        "state": state,
        "action": keypoint[:, 0],
        "episode_ends": np.arange(16, 97, 16),
    }
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def record(directory: Path) -> dict[str, Any]:
    """The training record, without the one figure that a kill may change."""
    training: dict[str, Any] = json.loads((directory / "config.json").read_text())["training"]
    assert training.pop("seconds") > 0
    return training


def fit(data: Path, out: Path, config: TrainConfig = TINY, **settings: Any) -> Path:
    return train(config, data, out, threads=1, progress=False, **settings)


# --- what comes out -------------------------------------------------------------------------------------------------


def test_windows_are_padded_as_in_diffusion_policy() -> None:
    # horizon 4, 2 observations (1 step of padding in front), 3 actions (2 behind), episodes 0..3 and 4..6
    windows = window_indices([(0, 4), (4, 7)], 4, 2, 3)
    assert windows.tolist() == [
        [0, 0, 1, 2],
        [0, 1, 2, 3],
        [1, 2, 3, 3],
        [2, 3, 3, 3],
        [4, 4, 5, 6],
        [4, 5, 6, 6],
        [5, 6, 6, 6],
    ]


def test_an_episode_too_short_for_a_window_gives_none() -> None:
    assert window_indices([(0, 2)], 10, 2, 8).shape == (1, 10)
    assert window_indices([(0, 1)], 10, 2, 8).shape == (0, 10)


def test_windows_hold_the_first_observations_and_all_actions_normalised(data: Path) -> None:
    demos = read_demonstrations(TINY.spec, data)
    begun = run.TrainingRun(TINY, demos, {}, "demos.npz")
    assert begun.train.obs.shape == (75, 2, 20)  # 5 episodes of 15 windows; the sixth is held out
    assert begun.train.action.shape == (75, 10, 2)
    assert begun.held_out.obs.shape == (15, 2, 20)
    assert begun.train.action.amin() == pytest.approx(-1, abs=1e-5)
    assert begun.train.action.amax() == pytest.approx(1, abs=1e-5)
    # the action is the first keypoint, so both normalise to the same numbers
    torch.testing.assert_close(begun.train.action[:, :2], begun.train.obs[:, :, :2])
    kept = begun.policy.normalizer.obs.unnormalize(begun.train.obs[1, 0])
    starts = [i for i in range(0, 96, 16) if np.allclose(kept[18:], demos.obs[i, 18:], atol=1e-2)]
    assert len(starts) == 1  # window 1 begins with an episode's first step, keypoints and then the agent
    np.testing.assert_array_equal(demos.obs[starts[0], 18:], demos_of(data)["state"][starts[0], :2])


def demos_of(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    config = replace(TINY, lr=1.0, warmup=4)
    rates = [run.learning_rate(step, 12, config) for step in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5)
    assert rates[12] == pytest.approx(0.0)


def test_average_follows_quickly_at_first() -> None:
    assert run.ema_decay(0) == 0
    assert run.ema_decay(15) == pytest.approx(0.875)  # 1 - 16^-0.75
    assert run.ema_decay(10**9) == 0.9995


def test_only_matrices_of_linear_and_attention_layers_decay(data: Path) -> None:
    begun = run.TrainingRun(TINY, read_demonstrations(TINY.spec, data), {}, "")
    decayed, others = begun.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (1e-3, 0.0)
    names = {id(weight): name for name, weight in begun.policy.model.named_parameters()}
    free = {names[id(weight)] for weight in others["params"]}
    assert {"pos_emb", "cond_pos_emb", "ln_f.weight", "head.bias"} <= free
    assert all(name.endswith(("bias", "pos_emb")) or "norm" in name or name == "ln_f.weight" for name in free)
    assert len(decayed["params"]) + len(free) == len(names)


def test_it_learns_and_leaves_a_policy_with_its_record(data: Path, tmp_path: Path) -> None:
    longer = replace(TINY, epochs=60, lr=1e-2, warmup=20)
    out = fit(data, tmp_path / "new" / "policy", longer)
    training = record(out)
    assert training["training_loss"] < 0.25  # about 0.4 is the best that can be had without the observations
    assert training["validation_loss"] > 0
    assert {name: training[name] for name in ("data", "windows", "batch", "steps", "epochs")} == {
        "data": "demos.npz",
        "windows": 75,
        "batch": 16,
        "steps": 240,
        "epochs": 60,
    }
    assert len(training["data_sha256"]) == 64
    policy = load_policy(out)
    assert (policy.config.task, policy.config.weights, policy.config.n_emb) == ("pusht", "ema", 16)
    action = policy.predict_action(torch.full((3, 2, 20), 250.0))["action"]
    assert action.shape == (3, 8, 2)
    assert ((action > -20) & (action < 520)).all()  # the sampler clips to the range of the demonstrations


def test_dropout_is_recorded_and_changes_training_but_not_inference(data: Path, tmp_path: Path) -> None:
    plain, dropped = fit(data, tmp_path / "plain"), fit(data, tmp_path / "dropped", replace(TINY, dropout=0.3))
    assert json.loads((dropped / "config.json").read_text())["p_drop_attn"] == 0.3
    assert json.loads((plain / "config.json").read_text())["p_drop_attn"] == 0.0
    assert weights(plain) != weights(dropped)
    policy = load_policy(dropped)
    without = load_policy(plain)
    without.load_state_dict(policy.state_dict())  # the same weights in a network that has no dropout
    obs = torch.rand(2, 2, 20) * 500
    actions = [p.predict_action(obs, generator=torch.Generator().manual_seed(1))["action"] for p in (policy, without)]
    assert torch.equal(*actions)
    with pytest.raises(TrainingError, match=r"another run: dropout 0\.3 \(now None\)"):
        fit(data, tmp_path / "dropped")


def test_the_start_is_recorded_and_makes_observations_count_from_the_first_step_on(data: Path, tmp_path: Path) -> None:
    config = replace(TINY, start="scaled")
    changes = []
    for each in (TINY, config):
        torch.manual_seed(0)
        model = each.recipe.begin(each.policy_config(), each.start).model
        near = torch.full((2, 2, 20), 0.5)
        near[1] += 0.02  # a hundredth of the range of an observation
        tokens = model.encode(torch.zeros(2, 1, TINY.width), near)
        changes.append((tokens[1] - tokens[0]).norm().item())
    assert changes[1] > 100 * changes[0]  # of what the decoder attends to
    out = fit(data, tmp_path / "scaled", config)
    assert json.loads((out / "config.json").read_text())["training"]["start"] == "scaled"
    assert "start" not in json.loads((fit(data, tmp_path / "plain") / "config.json").read_text())["training"]
    with pytest.raises(TrainingError, match=r"another run: start 'scaled' \(now None\)"):
        fit(data, tmp_path / "scaled")


def test_dropout_changes_nothing_in_the_engines(data: Path, tmp_path: Path) -> None:
    policy = load_policy(fit(data, tmp_path / "dropped", replace(TINY, dropout=0.3)))
    obs = torch.rand(1, 2, 20) * 500
    expected = policy.predict_action(obs, generator=torch.Generator().manual_seed(1))["action"]
    for engine in ("patched", "loop", "onnx"):
        with bc.accelerate(policy, engine=engine) as fast:
            found = fast.predict_action(obs, generator=torch.Generator().manual_seed(1))["action"]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)  # of some 500 pixels


def test_seed_decides_the_weights(data: Path, tmp_path: Path) -> None:
    first, same = fit(data, tmp_path / "a"), fit(data, tmp_path / "b")
    other = fit(data, tmp_path / "c", replace(TINY, seed=1))
    assert weights(first) == weights(same)
    assert weights(first) != weights(other)


def test_the_callers_torch_is_left_as_it_was(data: Path, tmp_path: Path) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    fit(data, tmp_path / "policy")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


# --- killed and resumed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_step", [True, False], ids=["saved-every-step", "saved-at-epoch-ends"])
@pytest.mark.parametrize("kill_at", [0, 1, 4, 6, STEPS - 1])
def test_killed_and_resumed_run_ends_in_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int, every_step: bool
) -> None:
    whole = fit(data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "SAVE_SECONDS", -1.0 if every_step else 1e9)
        kill_within_step(patch, kill_at)
        with pytest.raises(KeyboardInterrupt):
            fit(data, tmp_path / "killed")
        patch.undo()
        steps = count_steps(patch)
        killed = fit(data, tmp_path / "killed")
    saved = kill_at if every_step else kill_at // 4 * 4
    assert len(steps) == STEPS - saved
    assert weights(killed) == weights(whole)
    assert record(killed) == record(whole)


def kill_within_step(patch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C in the middle of an update: the weights have moved, their average has not."""
    decay = run.ema_decay

    def interrupted(now: int) -> float:
        if now == step:
            raise KeyboardInterrupt
        return decay(now)

    patch.setattr(run, "ema_decay", interrupted)


def count_steps(patch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    decay = run.ema_decay

    def counted(now: int) -> float:
        steps.append(now)
        return decay(now)

    patch.setattr(run, "ema_decay", counted)
    return steps


def test_the_last_epochs_are_kept_whenever_a_run_is_killed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(data, tmp_path / "whole", keep_last=2)
    with monkeypatch.context() as patch:
        kill_within_step(patch, STEPS - 2)  # in the last epoch: that before it is kept already
        with pytest.raises(KeyboardInterrupt):
            fit(data, tmp_path / "killed", keep_last=2)
    killed = fit(data, tmp_path / "killed", keep_last=2)
    for out in (whole, killed):
        kept = loop.checkpoints_of(out)
        assert sorted(path.name for path in kept.iterdir()) == ["0002", "0003"]
        assert weights(kept / "0003") == weights(out) != weights(kept / "0002")
        assert [record(kept / name)["epochs"] for name in ("0002", "0003")] == [2, 3]
        assert weights(kept / "0002") == weights(loop.checkpoints_of(whole) / "0002")
    assert not loop.checkpoints_of(fit(data, tmp_path / "none")).exists()
    with pytest.raises(TrainingError, match="of 3 epochs at most as many checkpoints can be kept, got 4"):
        fit(data, tmp_path / "many", keep_last=4)


def test_killed_between_state_and_policy(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit(data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_policy", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fit(data, tmp_path / "killed")
    assert weights(fit(data, tmp_path / "killed")) == weights(whole)


def test_killed_for_real(data: Path, tmp_path: Path) -> None:
    """SIGKILL to a process that saves after every step, at whatever moment it hits."""
    config = replace(TINY, epochs=1000)
    code = (
        "import sys; from blockcache_lab.training import TrainConfig, loop, train; loop.SAVE_SECONDS = -1;"
        f"train({config!r}, sys.argv[1], sys.argv[2], threads=1, progress=False)"
    )
    out, state = tmp_path / "killed", tmp_path / "killed.state.safetensors"
    process = subprocess.Popen([sys.executable, "-c", code, data, out])
    try:
        deadline = time.monotonic() + 120
        while not state.exists():
            assert process.poll() is None, "the training ended by itself"
            assert time.monotonic() < deadline, "no state within two minutes"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()

    class EnoughError(Exception):
        pass

    def weights_at(step: int, out: Path) -> dict[str, torch.Tensor]:
        """The average at a step, on the way to the end of the run."""
        taken: dict[str, torch.Tensor] = {}
        with pytest.MonkeyPatch.context() as patch:
            update = run.TrainingRun.step

            def watched(self: run.TrainingRun) -> None:
                if self.progress.step == step:
                    taken.update({name: tensor.clone() for name, tensor in self.tensors().items()})
                    raise EnoughError
                update(self)

            patch.setattr(run.TrainingRun, "step", watched)
            with pytest.raises(EnoughError):
                fit(data, out, config)
        return taken

    reached = json.loads(header_of(state))["progress"]["step"]
    assert 1 <= reached < 4000
    resumed, whole = weights_at(reached + 3, out), weights_at(reached + 3, tmp_path / "whole")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def header_of(state: Path) -> str:
    from safetensors import safe_open

    with safe_open(state, framework="pt") as file:
        return str(file.metadata()["header"])


def test_a_finished_run_has_nothing_left_to_do(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = fit(data, tmp_path / "policy")
    before = weights(out)
    steps = count_steps(monkeypatch)
    assert weights(fit(data, out)) == before
    assert steps == []
    assert fit(data, out, resume=False) == out
    assert len(steps) == STEPS
    assert weights(out) == before


# --- refused --------------------------------------------------------------------------------------------------------


def test_what_lies_beside_the_policy_is_safe(data: Path, tmp_path: Path) -> None:
    """Observations are kept in the policy's directory. A finished run leaves it alone, a new one refuses at once."""
    fit(data, tmp_path / "out")
    (tmp_path / "out" / "observations.npz").write_bytes(b"seen")
    before = weights(tmp_path / "out")
    fit(data, tmp_path / "out")
    with pytest.raises(FileError, match=r"holds observations\.npz besides a policy"):
        fit(data, tmp_path / "out", resume=False)
    assert (tmp_path / "out" / "observations.npz").read_bytes() == b"seen"
    assert weights(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": None}, "lack the array 'action'"),
        ({"keypoint": None}, "lack the array 'keypoint'"),
        (
            {"action": np.zeros((96, 3), dtype=np.float32)},
            r"\(96, 3\) of float32, task 'pusht' needs \(steps, 2\) of numbers",
        ),
        ({"keypoint": np.zeros((96, 8, 2), dtype=np.float32)}, r"observations .* \(96, 18\)"),
        ({"action": np.full((96, 2), np.nan, dtype=np.float32)}, "actions .* NaN"),
        ({"episode_ends": np.array([16, 95])}, "rise to the number of steps"),
        ({"episode_ends": np.array([32, 16, 96])}, "rise to the number of steps"),
        ({"episode_ends": np.array([], dtype=np.int64)}, "rise to the number of steps"),
        ({"episode_ends": np.array([96])}, "at least 2 episodes"),
        ({"episode_ends": np.arange(1, 97)}, "long enough for a window of 10 steps"),
        ({"episode_ends": np.array([{}], dtype=object)}, "plain arrays"),  # would need pickle
    ],
)
def test_unsuitable_demonstrations(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = write_demos(tmp_path / "bad.npz", **changes)
    with pytest.raises(BlockcacheError, match=message):
        fit(data, tmp_path / "policy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.npz"]


def test_files_that_are_no_demonstrations(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        fit(tmp_path / "none.npz", tmp_path / "policy")
    (tmp_path / "text.npz").write_text("no arrays here")
    with pytest.raises(FileError, match=r"expected an \.npz file"):
        fit(tmp_path / "text.npz", tmp_path / "policy")
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(FileError, match=r"lack the array 'keypoint'; found \['obs'\]"):
        fit(tmp_path / "single.npy", tmp_path / "policy")
    whole = write_demos(tmp_path / "demos.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"expected an \.npz file"):
        fit(tmp_path / "cut.npz", tmp_path / "policy")


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (TrainingError, {"epochs": 0}),
        (TrainingError, {"batch": 1.5}),
        (TrainingError, {"seed": -1}),
        (TrainingError, {"lr": 0.0}),
        (TrainingError, {"lr": float("nan")}),
        (TrainingError, {"dropout": 1.0}),
        (TrainingError, {"dropout": -0.1}),
        (TrainingError, {"dropout": float("nan")}),
        (TrainingError, {"dropout": 0.3, "family": "dit"}),
        (TrainingError, {"start": "scaled", "family": "dit"}),
        (PolicyError, {"width": 15}),
        (PolicyError, {"horizon": 8}),
        (TaskError, {"task": "tennis"}),
    ],
)
def test_unsuitable_settings(error: type[BlockcacheError], changes: dict[str, Any]) -> None:
    with pytest.raises(error):
        replace(TINY, **changes)


def test_what_is_there_is_not_overwritten(data: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    for resume in (True, False):
        with pytest.raises(TrainingError, match="not a policy"):
            fit(data, tmp_path / "home", resume=resume)
    assert (tmp_path / "home" / "thesis.txt").exists()
    out = fit(data, tmp_path / "policy")
    (tmp_path / "policy.state.safetensors").unlink()
    with pytest.raises(TrainingError, match=r"no policy\.state\.safetensors to go on from"):
        fit(data, out)


def test_state_of_another_run(data: Path, tmp_path: Path) -> None:
    out = fit(data, tmp_path / "policy")
    before = weights(out)
    with pytest.raises(TrainingError, match=r"another run: epochs 3 \(now 5\)"):
        fit(data, out, replace(TINY, epochs=5))
    with pytest.raises(TrainingError, match=r"another run: dropout None \(now 0\.3\)"):
        fit(data, out, replace(TINY, dropout=0.3))
    with pytest.raises(TrainingError, match="another run: data_sha256"):
        fit(write_demos(tmp_path / "other.npz", action=np.ones((96, 2), dtype=np.float32)), out)
    assert weights(out) == before


def test_state_that_is_damaged(data: Path, tmp_path: Path) -> None:
    out = fit(data, tmp_path / "policy")
    state = tmp_path / "policy.state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-100])
    with pytest.raises(FileError, match="cannot be read"):
        fit(data, out)
    state.write_bytes(whole.replace(b"blockcache-training-state", b"blockcache-training-skate"))
    with pytest.raises(FileError, match="is not a training state"):
        fit(data, out)


def test_a_state_from_before_made_by_goes_on(data: Path, tmp_path: Path) -> None:
    out = fit(data, tmp_path / "policy")
    state = tmp_path / "policy.state.safetensors"
    header = json.loads(header_of(state))
    assert header.pop("made_by").startswith("blockcache ")
    tensors = safetensors.torch.load(state.read_bytes())
    state.write_bytes(safetensors.torch.save(tensors, metadata={"header": json.dumps(header)}))
    before = weights(out)
    assert weights(fit(data, out)) == before
    for progress in ({}, header["progress"] | {"mood": "good"}):
        garbled = {"header": json.dumps(header | {"progress": progress})}
        state.write_bytes(safetensors.torch.save(tensors, metadata=garbled))
        with pytest.raises(FileError, match=r"the training state .*policy\.state\.safetensors is garbled .*remove it"):
            fit(data, out)


def test_a_place_for_the_state_is_looked_for_before_training(data: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.state.safetensors").mkdir()
    with pytest.raises(FileError, match=r"cannot write .*policy\.state\.safetensors: it is not a regular file"):
        fit(data, tmp_path / "policy", resume=False)
    with pytest.raises(FileError, match=r"cannot write .*a/b/c"):
        fit(data, tmp_path / "a" / "b" / "c" / "policy")
    assert sorted(os.listdir(tmp_path)) == ["demos.npz", "policy.state.safetensors"]


def test_diverging_training_stops(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="lower the learning rate"):
        fit(data, tmp_path / "policy", replace(TINY, lr=1e30, warmup=0, epochs=20))


def test_spec_is_the_demonstrations_observation() -> None:
    assert (task_spec("pusht").obs_dim, task_spec("pusht").action_dim) == (20, 2)
