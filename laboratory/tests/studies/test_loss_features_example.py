"""examples/loss_features.py: what its further features tell, and its way from results files to the page."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from blockcache.measure.action_error import ActionError
from blockcache.measure.features import ActionFeatures
from blockcache.models.registry import port_of
from blockcache.results.rollouts import MethodRun, Record, Results
from blockcache.samplers import DDPM
from blockcache_lab.studies import loss_data, losses
from blockcache_lab.studies.loss_data import LossData
from repository import load_example

KNOWN = ActionFeatures(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
OBS = np.random.default_rng(0).standard_normal((12, 2, 5), dtype=np.float32)


@pytest.fixture(scope="module")
def example():
    return load_example("loss_features")


@pytest.fixture
def own():
    """Chunks of a policy: 20 observations, 16 samples, 6 actions of 2 numbers, with a way of its own at each."""
    random = np.random.default_rng(1)
    return random.standard_normal((20, 1, 6, 2)) + 0.1 * random.standard_normal((20, 16, 6, 2))


def more(example, own, change):
    return example.more_features(KNOWN, own + change, own, own)


def test_a_shift_that_goes_everywhere_the_same_way_is_told_from_one_that_does_not(example, own):
    ways = np.where(np.arange(20) // 2 % 2, 0.3, -0.3)[:, None, None, None]
    same, either = more(example, own, 0.3), more(example, own, ways)
    assert same.common_shift == pytest.approx(0.3)
    assert either.common_shift == 0
    assert (same.moved_shift, same.own_spread) == (pytest.approx(0, abs=0.05), KNOWN.own_spread)


def test_one_bad_observation_in_five_is_a_tail(example, own):
    seldom = np.where(np.arange(20) % 5, 0.0, 1.0)[:, None, None, None]
    assert more(example, own, seldom).tail_shift > 0.9
    assert more(example, own, 0.2).tail_shift < 0.4


def test_one_rough_dimension_is_the_worst(example, own):
    shaking = np.zeros((20, 16, 6, 2))
    shaking[..., 1] = 0.5 * (-1.0) ** np.arange(6)
    found = more(example, own, shaking)
    rougher = [example.of_dimension((own + shaking)[..., [place]], own[..., [place]])[2] for place in range(2)]
    assert rougher[0] == 0
    assert found.worst_rougher == pytest.approx(rougher[1])
    assert found.worst_rougher > 0.5


def test_observations_move_to_where_the_policy_would_do_what_the_method_does(example):
    seen = np.random.default_rng(2).standard_normal((200, 3))
    actions = seen[:, None, None, :]  # this policy does what it sees
    moved = example.moved_by(seen, actions, actions + np.array([0.1, 0.0, 0.0]))
    assert (moved - seen).mean(axis=0) == pytest.approx([0.1 * example.AHEAD, 0, 0], abs=0.07)
    both = example.moved_by({"state": seen, "mask": np.ones(200, dtype=bool)}, actions, actions)
    np.testing.assert_array_equal(both["state"], seen)
    assert both["mask"].all()


def test_all_groups_are_judged_on_every_task(example, policy, monkeypatch, tmp_path):
    port, steps = port_of(policy), {f"ddpm-{count}": count for count in (2, 3, 4)}
    samplers = {"full": dict(port.sampling.settings)} | {
        name: DDPM(num_inference_steps=count).to_dict() for name, count in steps.items()
    }
    lost = {"full": 0.0, "ddpm-2": 0.5, "ddpm-3": 0.3, "ddpm-4": 0.2}
    found = Results(
        task={"name": "toy", "success": "none", "max_steps": 9},
        policy={"source": "tiny", "fingerprint": port.fingerprint.to_dict()},
        setting={
            "first_seed": 0, "rollouts": 8, "group": 2, "open_loop_observations": 2, "calibration": {"generations": 2},
        },
        noise_floor=ActionError(0.1, 0.2),
        methods=tuple(
            MethodRun(name, "loop", sampler, None, True, 10, 0.0, ActionError(0.1, 0.2))
            for name, sampler in samplers.items()
        ),
        records=tuple(
            Record(name, seed, 1 - loss, True, 9, None, 0.1, None) for name, loss in lost.items() for seed in range(8)
        ),
    )  # fmt: skip
    for module in (losses, example):
        monkeypatch.setattr(module, "OBSERVATIONS", 6)
        monkeypatch.setattr(module, "SAMPLES", 4)
    monkeypatch.setattr(loss_data, "MOST_TERMS", 1)  # all that takes time is to try every sum
    rows = losses.measure_losses([found], {"tiny": (port, OBS)}, progress=False).rows
    unknown = replace(rows[0], task="task 1", ran="0" * 16)  # no file has it any more
    data = LossData(6, 4, (*(replace(row, task=f"task {place}") for place in range(4) for row in rows), unknown))
    monkeypatch.setattr(example, "known_losses", lambda: data)
    monkeypatch.setattr(example, "PolicySource", lambda _: SimpleNamespace(port=port, observations=lambda _: OBS))
    (tmp_path / "records").mkdir()
    found.save(tmp_path / "records" / "results.json")
    (tmp_path / "records" / "notes.json").write_text("{}")
    page, state = tmp_path / "page.md", tmp_path / "state"
    typed = ["loss_features.py", str(tmp_path / "records"), "-o", str(page), "--state", str(state)]
    monkeypatch.setattr(sys, "argv", typed)
    example.main()
    written = page.read_text()
    assert written.splitlines()[2].startswith("12 methods, 6 observations, 4 chunks each")
    assert "| task 0 | task 1 | task 2 | task 3 | with a task fewer |" in written
    assert [line.split(" | ")[0] for line in written.splitlines()[6:]] == [f"| {group}" for group in example.GROUPS]
    kept = {file: file.stat().st_mtime_ns for file in state.rglob("*.npy")}
    assert len(kept) == 1 + 2 * len(steps)
    example.main()
    assert page.read_text() == written
    assert {file: file.stat().st_mtime_ns for file in state.rglob("*.npy")} == kept  # nothing is drawn twice
