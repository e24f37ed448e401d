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
    told = demonstrate("toy", tmp_path / "demos.npz", 5, noise=0.2, progress=False)
    demos = read_demonstrations(by_name, tmp_path / "demos.npz")
    assert len(demos.episodes) == 5
    assert (told.kept, told.failed, told.errors) == (5, 0, {})
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
    assert demonstrate("toy", tmp_path / "demos.npz", 3, progress=False).failed == 0
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
    assert demonstrate("toy", tmp_path / "demos.npz", 3, progress=False).failed == 3
    demos = read_demonstrations(by_name, tmp_path / "demos.npz")
    assert {round(float(obs[4])) for obs in demos.obs} == {1, 3, 5}  # the toy shows its seed


def test_an_expert_that_never_succeeds_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(Reach, "success", property(lambda self: False))
    with pytest.raises(TrainingError, match="failed 50 times in a row; take less noise; nothing was written"):
        demonstrate("toy", tmp_path / "demos.npz", 3, progress=False)
    assert not list(tmp_path.iterdir())


def test_what_an_expert_showed_before_it_never_succeeded_again_is_kept(tmp_path, monkeypatch, by_name):
    monkeypatch.setattr(Reach, "success", property(lambda self: self.seed < 2 and self.steps >= 4))
    with pytest.raises(TrainingError, match=r"take less noise; the 2 episodes before are in .*demos\.npz"):
        demonstrate("toy", tmp_path / "demos.npz", 3, progress=False)
    assert len(read_demonstrations(by_name, tmp_path / "demos.npz").episodes) == 2


class Breaks(Reach):
    """Once it has raised, it raises whatever is asked of it, even to be closed."""

    seeds = frozenset({1, 3})
    broken = False

    def reset(self, seed):
        self.check()
        return super().reset(seed)

    def step(self, action):
        self.broken |= self.seed in self.seeds and self.steps == 2
        self.check()
        super().step(action)

    def close(self):
        self.check()

    def check(self):
        if self.broken:
            raise RuntimeError("the table broke\nwhere it was mended")


@pytest.fixture
def breaks(monkeypatch, by_name):
    """The same task, whose simulator raises in mid-episode with some seeds."""
    entry = TaskEntry(by_name, f"{__name__}:Breaks", LONG.expert)
    monkeypatch.setattr(blockcache.tasks.base, "_find", {"toy": entry}.__getitem__)
    return monkeypatch


def test_an_episode_that_raises_is_counted_and_others_go_on(tmp_path, breaks, by_name):
    told = demonstrate("toy", tmp_path / "demos.npz", 4, progress=False)
    assert (told.kept, told.failed, told.errors) == (4, 0, {"RuntimeError: the table broke": 2})
    with np.load(tmp_path / "demos.npz") as arrays:
        assert arrays["seeds"].tolist() == [0, 2, 4, 5]
    assert len(read_demonstrations(by_name, tmp_path / "demos.npz").episodes) == 4
    assert len(MADE) == 3  # a fresh one after each that broke, and only then


def test_an_expert_that_failed_is_told_apart_from_what_raised(tmp_path, breaks):
    breaks.setattr(Reach, "success", property(lambda self: self.seed > 4 and self.steps >= 4))
    told = demonstrate("toy", tmp_path / "demos.npz", 2, progress=False)
    assert (told.kept, told.failed, told.errors) == (2, 3, {"RuntimeError: the table broke": 2})


def test_an_expert_may_raise_too_and_a_fresh_simulator_may_not_be_had(tmp_path, breaks, by_name):
    def make(spec):
        if len(MADE) == 1:
            MADE.append(None)
            raise OSError("no room")
        return Breaks(spec)

    def expert(task):
        return pull(task) if task.seed else [][0]

    breaks.setattr(Breaks, "seeds", set())
    entry = TaskEntry(by_name, f"{__name__}:make", f"{__name__}:expert")
    for name, made in (("make", make), ("expert", expert)):
        breaks.setitem(globals(), name, made)
    breaks.setattr(blockcache.tasks.base, "_find", {"toy": entry}.__getitem__)
    told = demonstrate("toy", tmp_path / "demos.npz", 2, progress=False)
    assert told.errors == {"IndexError: list index out of range": 1, "OSError: no room": 1}


@pytest.mark.parametrize(
    ("seen", "wanted", "error"),
    [
        (np.nan, 0, "TaskError: the simulator's observation holds NaN or infinity"),
        (0, np.inf, "TrainingError: the expert's action is not finite at step 0"),
    ],
)
def test_numbers_that_training_would_refuse_end_their_own_episode(tmp_path, monkeypatch, seen, wanted, error):
    show, act = Reach.observe, pull
    monkeypatch.setattr(Reach, "observe", lambda self: show(self) + np.float32(seen if self.seed == 1 else 0))
    monkeypatch.setitem(globals(), "pull", lambda task: lambda obs: act(task)(obs) + (wanted if task.seed == 1 else 0))
    assert demonstrate("toy", tmp_path / "demos.npz", 3, progress=False).errors == {error: 1}


def test_a_simulator_that_always_raises_is_given_up(tmp_path, breaks):
    breaks.setattr(Breaks, "seeds", set(range(100)))
    with pytest.raises(
        TrainingError, match=r"^20 episodes raised .* RuntimeError: the table broke; mend that; nothing"
    ):
        demonstrate("toy", tmp_path / "demos.npz", 3, progress=False)
    assert len(MADE) == 20
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("before", "written"), [(1, "nothing was written"), (2, "the 2 episodes before are in")])
def test_one_that_raises_from_some_seed_on_costs_nothing_of_what_was_kept(
    tmp_path, breaks, by_name, command, before, written
):
    breaks.setattr(Breaks, "seeds", set(range(before, 100)))
    path = tmp_path / "demos.npz"
    code, _, told = command("policy", "demonstrate", "toy", "-o", path, "--episodes", 5, "--noise", 0)
    assert code == 2
    assert f"mend that; {written}" in told
    assert path.exists() == (before == 2)
    if path.exists():
        assert len(read_demonstrations(by_name, path).episodes) == 2


def test_the_verb_names_the_errors(tmp_path, breaks, command):
    breaks.setattr(Reach, "success", property(lambda self: self.seed > 2 and self.steps >= 4))
    code, out, _ = command("policy", "demonstrate", "toy", "-o", tmp_path / "demos.npz", "--episodes", 2, "--noise", 0)
    assert code == 0
    assert "2 episodes; the expert failed in 2 more" in out
    assert "2 more ended with an error, and are left out too:\n  2 x RuntimeError: the table broke\n" in out


def versioned(monkeypatch, spec, version):
    """The task in another version."""
    other = replace(spec, version=version)
    monkeypatch.setattr(blockcache.tasks.base, "_find", {"toy": replace(LONG, spec=other)}.__getitem__)
    return other


def test_demonstrations_of_another_version_are_refused(tmp_path, monkeypatch, by_name):
    demonstrate("toy", tmp_path / "first.npz", 2, progress=False)
    second = versioned(monkeypatch, by_name, 2)
    demonstrate("toy", tmp_path / "second.npz", 2, progress=False)
    with np.load(tmp_path / "first.npz") as one, np.load(tmp_path / "second.npz") as two:
        assert "task_version" not in one  # a file of version 1 has the bytes that it always had
        assert two["task_version"] == 2
    refused = r"version {} of task 'toy', expected {}: .*; make them again with 'blockcache policy demonstrate toy'"
    with pytest.raises(TrainingError, match=r"first\.npz are of " + refused.format(1, 2)):
        read_demonstrations(second, tmp_path / "first.npz")
    with pytest.raises(TrainingError, match=r"second\.npz are of " + refused.format(2, 1)):
        read_demonstrations(by_name, tmp_path / "second.npz")
    assert len(read_demonstrations(second, tmp_path / "second.npz").episodes) == 2


@pytest.mark.parametrize("version", [np.array("x" * 99), np.array([2]), np.array(2.0), np.arange(999), np.array(-2)])
def test_a_version_that_is_none_is_refused_briefly(tmp_path, by_name, version):
    demonstrate("toy", tmp_path / "demos.npz", 2, progress=False)
    with np.load(tmp_path / "demos.npz") as arrays:
        np.savez(tmp_path / "demos.npz", **{**arrays, "task_version": version})
    with pytest.raises(TrainingError, match=r"of version .* of task 'toy', expected 2") as refused:
        read_demonstrations(replace(by_name, version=2), tmp_path / "demos.npz")
    assert len(str(refused.value).replace(str(tmp_path), "")) < 300


def test_a_file_that_names_no_task_is_taken_whatever_the_version(tmp_path, by_name):
    demonstrate("toy", tmp_path / "demos.npz", 2, progress=False)
    with np.load(tmp_path / "demos.npz") as arrays:
        np.savez(tmp_path / "demos.npz", **{name: array for name, array in arrays.items() if name != "task"})
    assert len(read_demonstrations(replace(by_name, version=2), tmp_path / "demos.npz").episodes) == 2


def test_the_verb_refuses_to_train_on_another_version(tmp_path, monkeypatch, by_name, refused):
    demonstrate("toy", tmp_path / "demos.npz", 2, progress=False)
    versioned(monkeypatch, by_name, 2)
    line = refused("policy", "train", "toy", "--data", tmp_path / "demos.npz", "-o", tmp_path / "policy")
    assert "are of version 1 of task 'toy', expected 2" in line


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "2"])
def test_a_version_is_a_number_from_1_on(by_name, version):
    with pytest.raises(TaskError, match="the version of task 'toy' must be a whole number from 1 on"):
        replace(by_name, version=version)


def test_a_first_version_is_not_said(by_name):
    """Finished rollouts are found by what a task says of itself: those of before count for a version of 1."""
    assert "version" not in by_name.describe()
    assert replace(by_name, version=2).describe() == {**by_name.describe(), "version": 2}


def test_the_file_says_its_task_and_seeds_and_is_refused_elsewhere(tmp_path, monkeypatch, by_name):
    monkeypatch.setattr(Reach, "success", property(lambda task: task.seed != 1 and task.steps > 3))
    assert demonstrate("toy", tmp_path / "demos.npz", 3, progress=False).failed == 1
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
