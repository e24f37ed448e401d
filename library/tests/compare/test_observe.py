"""Observations to calibrate on: decisions of running episodes only, from all over them, never from test seeds."""

from functools import partial

import numpy as np
import pytest

from blockcache.compare.observe import observe
from blockcache.errors import TaskError
from blockcache.models.loading import save_policy
from dit_policies import tiny_dit
from toy_task import Toy


class Brief(Toy):
    """Episodes of odd seeds end at the first step, those of even seeds last."""

    @property
    def done(self):
        return self.steps >= (1 if self.seed % 2 else self.spec.max_steps)


def moments(obs):
    """(seed mod 7, step) of each observation: the toy shows both."""
    return sorted((round(float(last[4])), round(float(last[3]) * 9)) for last in obs[:, -1])


def test_an_episode_that_is_over_is_not_observed(make_policy, toy_by_name, monkeypatch):
    monkeypatch.setattr("toy_task.Toy", Brief)
    found = observe(
        make_policy(), "toy", episodes=4, count=8
    ).obs  # chunks of 4 actions, 9 steps: decisions at 0, 4 and 8
    assert found.shape == (8, 2, 5)
    assert moments(found) == sorted([(1, 0), (3, 0)] + [(seed, step) for seed in (0, 2) for step in (0, 4, 8)])
    with pytest.raises(TaskError, match="4 episodes gave 8 observations, 9 were asked for; use more episodes"):
        observe(make_policy(), "toy", episodes=4, count=9)


def test_a_simulator_that_fails_is_named(make_policy, toy_by_name, monkeypatch):
    monkeypatch.setattr("toy_task.Toy", partial(Toy, fails={2: 3}))
    with pytest.raises(TaskError, match="failed with seed 2: RuntimeError: the table broke; observe other seeds"):
        observe(make_policy(), "toy", episodes=4, count=8)


def test_episodes_that_are_over_at_once_show_nothing(make_policy, toy_by_name, monkeypatch):
    monkeypatch.setattr(Toy, "done", True)
    with pytest.raises(TaskError, match="4 episodes gave 0 observations, 8 were asked for; use more episodes"):
        observe(make_policy(), "toy", episodes=4, count=8)


def test_the_first_few_are_from_all_over_the_episodes(make_policy, toy_by_name):
    found = observe(make_policy(), "toy", episodes=6, count=18).obs
    assert {step for _, step in moments(found[:6])} == {0, 4, 8}
    np.testing.assert_array_equal(found, observe(make_policy(), "toy", episodes=6, count=18).obs)


def test_a_part_of_all_decisions_is_spread_over_the_episodes_and_says_when_each_was(make_policy, toy_by_name, tmp_path):
    seen = observe(make_policy(), "toy", episodes=6, count=9, first_seed=20)
    chunks = seen.moments[:, 1].tolist()
    assert [chunks.count(chunk) for chunk in range(3)] == [3, 3, 3]  # beginning, middle and end alike
    assert set(seen.moments[:, 0]) <= set(range(20, 26))
    assert len(set(seen.moments[:, 0])) > 3
    shown = [(round(float(last[4])), round(float(last[3]) * 9)) for last in seen.obs[:, -1]]
    assert shown == [(seed % 7, 4 * chunk) for seed, chunk in seen.moments.tolist()]
    seen.save(tmp_path / "seen.npz")
    kept = np.load(tmp_path / "seen.npz")
    np.testing.assert_array_equal(kept["obs"], seen.obs)
    np.testing.assert_array_equal(kept["moments"], seen.moments)


def test_test_seeds_are_refused(make_policy, toy_by_name):
    with pytest.raises(TaskError, match="reach into the test seeds"):
        observe(make_policy(), "toy", episodes=4, count=8, first_seed=99_998)


def test_new_ones_stand_behind_those_of_a_file(make_policy, toy_by_name):
    seen = observe(make_policy(), "toy", episodes=6, count=9, first_seed=20)
    more = observe(make_policy(), "toy", episodes=6, count=5, first_seed=40).appended_to(seen.obs, seen.moments)
    np.testing.assert_array_equal(more.obs[:9], seen.obs)
    assert {int(seed) // 20 for seed in more.moments[9:, 0]} == {2}
    assert len(more.obs) == len(more.moments) == 14
    assert more.appended_to(seen.obs, None).moments is None


def test_what_a_task_shows_without_a_name_is_the_only_input_of_a_policy(toy_by_name, command, tmp_path):
    save_policy(tiny_dit(vectors={}, action_dim=3, task="toy"), tmp_path / "dit")
    code, out, _ = command(
        "policy",
        "observe",
        tmp_path / "dit",
        "-o",
        tmp_path / "dit" / "observations.npz",
        "--episodes",
        3,
        "--count",
        6,
    )
    assert (code, "6 observations of 3 episodes" in out) == (0, True)
    options = ["--rollouts", 2, "--workers", 1, "--generations", 4, "-o", tmp_path / "eval.json"]
    code, out, error = command("eval", tmp_path / "dit", "-m", "bac:S=2,n=1", *options)
    assert code == 0, error
    assert "bac:S=2,n=1" in out
