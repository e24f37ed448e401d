"""Demonstrations by an expert: its own actions are kept whatever was executed, failures and test seeds are not."""

from dataclasses import replace

import numpy as np
import pytest

import blockcache.tasks.base
from blockcache.errors import BlockcacheError, TaskError
from blockcache.tasks import TaskEntry, expert_factory
from blockcache_lab.training import TrainingError, demonstrate
from blockcache_lab.training.data import read_demonstrations
from blockcache_lab.training.demonstrate import LINGER
from toy_task import SPEC, Toy

MADE = []  # simulators, in the order in which they were made
LONG = TaskEntry(SPEC, f"{__name__}:Reach", f"{__name__}:pull")


class Reach(Toy):
    """Remembers what was executed."""

    def __init__(self, spec):
        super().__init__(spec)
        self.executed = []
        MADE.append(self)

    def step(self, action):
        self.executed.append(np.array(action))
        super().step(10 * action)


def pull(task):
    return lambda seen: -seen[:3].astype(np.float64)


@pytest.fixture(autouse=True)
def by_name(monkeypatch):
    entry = replace(LONG, spec=replace(SPEC, max_steps=40))
    entries = {"toy": entry, "silent": TaskEntry(replace(SPEC, name="silent"), LONG.factory)}
    monkeypatch.setattr(blockcache.tasks.base, "_find", entries.__getitem__)
    MADE.clear()
    return entry.spec


def test_the_experts_own_actions_are_kept(tmp_path, by_name):
    failed = demonstrate("toy", tmp_path / "demos.npz", 5, noise=0.2, progress=False)
    demos = read_demonstrations(by_name, tmp_path / "demos.npz")
    assert len(demos.episodes) == 5
    assert failed == 0
    np.testing.assert_array_equal(demos.action, -demos.obs[:, :3])
    executed = np.array(MADE[0].executed)
    assert 0.1 < np.abs(executed - demos.action).mean() < 0.3  # the noise was executed


def test_noise_in_one_of_some_steps_leaves_the_others_as_they_are(tmp_path, by_name):
    demonstrate("toy", tmp_path / "demos.npz", 20, noise=0.2, every=4, progress=False)
    demos = read_demonstrations(by_name, tmp_path / "demos.npz")
    disturbed = np.abs(np.array(MADE[0].executed) - demos.action).max(axis=1) > 1e-6
    assert 0.15 < disturbed.mean() < 0.35  # a quarter of them
    assert len(set(np.diff(np.flatnonzero(disturbed)))) > 2  # drawn, not counted off


def test_a_push_stays_the_same_for_some_steps(tmp_path, by_name):
    demonstrate("toy", tmp_path / "demos.npz", 20, noise=0.2, every=8, lasting=3, progress=False)
    demos = read_demonstrations(by_name, tmp_path / "demos.npz")
    pushes = (np.array(MADE[0].executed) - demos.action).round(5)
    again = [(pushes[at] == pushes[at + 1]).all() for at in range(len(pushes) - 1) if pushes[at].any()]
    assert 0.15 < pushes.any(axis=1).mean() < 0.45  # three steps of eight; some begin while another lasts
    assert 0.4 < np.mean(again) < 0.8  # two of three go on


def test_a_push_of_no_step_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="for 1 or more"):
        demonstrate("toy", tmp_path / "demos.npz", 3, lasting=0, progress=False)


def test_without_noise_what_is_kept_is_what_was_executed(tmp_path, by_name):
    assert demonstrate("toy", tmp_path / "demos.npz", 3, progress=False) == 0
    demos = read_demonstrations(by_name, tmp_path / "demos.npz")
    np.testing.assert_allclose(np.array(MADE[0].executed), demos.action, rtol=1e-6)


def test_episodes_go_on_for_a_while_after_success(tmp_path, by_name):
    demonstrate("toy", tmp_path / "demos.npz", 3, progress=False)
    demos = read_demonstrations(by_name, tmp_path / "demos.npz")
    for start, stop in demos.episodes:
        near = [1 / (1 + np.linalg.norm(obs[:3])) > 1 / 1.6 for obs in demos.obs[start:stop]]
        assert sum(near) == LINGER - 1 or near[0]  # the last observation is not kept: no action follows it
        assert near[-1]


def test_failures_are_left_out_and_counted(tmp_path, monkeypatch, by_name):
    monkeypatch.setattr(Reach, "success", property(lambda self: self.seed % 2 == 1 and self.steps >= 4))
    assert demonstrate("toy", tmp_path / "demos.npz", 3, progress=False) == 3
    demos = read_demonstrations(by_name, tmp_path / "demos.npz")
    assert {round(float(obs[4])) for obs in demos.obs} == {1, 3, 5}  # the toy shows its seed


def test_an_expert_that_never_succeeds_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(Reach, "success", property(lambda self: False))
    with pytest.raises(TrainingError, match="failed 50 times in a row; nothing was written, take less noise"):
        demonstrate("toy", tmp_path / "demos.npz", 3, progress=False)
    assert not list(tmp_path.iterdir())


def test_the_file_says_its_task_and_seeds_and_is_refused_elsewhere(tmp_path, monkeypatch, by_name):
    monkeypatch.setattr(Reach, "success", property(lambda task: task.seed != 1 and task.steps > 3))
    assert demonstrate("toy", tmp_path / "demos.npz", 3, progress=False) == 1
    with np.load(tmp_path / "demos.npz") as arrays:
        assert arrays["seeds"].tolist() == [0, 2, 3]
        assert arrays["task"] == "toy"
    with pytest.raises(TrainingError, match="are of task 'toy', not of 'other'"):
        read_demonstrations(replace(by_name, name="other"), tmp_path / "demos.npz")


def test_the_same_command_writes_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        demonstrate("toy", tmp_path / name, 3, noise=0.1, progress=False)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_test_seeds_are_never_shown(tmp_path):
    with pytest.raises(TrainingError, match="before the test seeds"):
        demonstrate("toy", tmp_path / "demos.npz", 3, first_seed=SPEC.first_test_seed - 2, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("episodes", "noise", "every"), [(1, 0.0, 1), (3, -0.1, 1), (3, 1.0, 1), (3, float("nan"), 1), (3, 0.1, 0)]
)
def test_useless_demands_are_refused(tmp_path, episodes, noise, every):
    with pytest.raises(BlockcacheError, match="at least 2 episodes and noise from 0 to below 1"):
        demonstrate("toy", tmp_path / "demos.npz", episodes, noise=noise, every=every, progress=False)


def test_a_task_without_an_expert_says_so():
    with pytest.raises(TaskError, match="'silent' has no expert of its own"):
        expert_factory("silent")


def test_the_verb(tmp_path, command):
    code, out, _ = command("policy", "demonstrate", "toy", "-o", tmp_path / "demos.npz", "--episodes", 3, "--noise", 0)
    assert code == 0
    assert "3 episodes; the expert failed in 0 more" in out
