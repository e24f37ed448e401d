"""Demonstrations played again: they end as recorded in their own simulator, and other files and seeds are noticed."""

from dataclasses import replace

import numpy as np
import pytest

import blockcache.tasks.base
from blockcache.tasks import TaskEntry
from blockcache_lab.training import TrainingError, demonstrate
from blockcache_lab.training.replay import replay
from toy_task import SPEC, Toy


class Reach(Toy):
    def step(self, action):
        super().step(10 * np.asarray(action, dtype=np.float64))


def pull(task):
    return lambda seen: -seen[:3].astype(np.float32)


@pytest.fixture
def demos(monkeypatch, tmp_path):
    entry = TaskEntry(replace(SPEC, max_steps=40), f"{__name__}:Reach", f"{__name__}:pull")
    monkeypatch.setattr(blockcache.tasks.base, "_find", {"toy": entry}.__getitem__)
    path = tmp_path / "demos.npz"
    demonstrate("toy", path, 4, first_seed=5, progress=False)
    return path


def rewritten(path, **changes):
    with np.load(path) as found:
        arrays = {**found, **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_own_demonstrations_are_repeated(demos):
    found = replay("toy", demos, progress=False)
    assert found.as_recorded == (True,) * 4
    assert found.residuals == (0.0,) * 4
    assert replay("toy", demos, episodes=2, progress=False).as_recorded == (True,) * 2


def test_files_without_seeds_count_them_from_the_first(demos):
    rewritten(demos, seeds=None)
    assert replay("toy", demos, first_seed=5, progress=False).residuals == (0.0,) * 4
    with pytest.raises(TrainingError, match="episode 0 does not begin as task 'toy' does with seed 0"):
        replay("toy", demos, progress=False)


def test_an_episode_that_ends_otherwise_is_counted(demos):
    rewritten(demos, final_reward=np.array([1.0, 0.0, 1.0, 0.4]))
    assert replay("toy", demos, progress=False).as_recorded == (True, False, True, False)


def test_another_way_of_the_same_scene_shows_as_residual(demos):
    with np.load(demos) as arrays:
        action = arrays["action"] * np.float32(0.999)
    found = replay("toy", rewritten(demos, action=action), progress=False)
    assert 1e-6 < max(found.residuals) < 0.05


@pytest.mark.parametrize("changes", [{"seeds": np.arange(3)}, {"final_reward": np.zeros((4, 1))}])
def test_misshapen_arrays_are_refused(demos, changes):
    with pytest.raises(TrainingError, match="one number for each of the 4 episodes"):
        replay("toy", rewritten(demos, **changes), progress=False)


def test_the_verb(demos, command):
    code, out, _ = command("policy", "replay", "toy", "--data", demos)
    assert code == 0
    assert "4 of 4 episodes end as recorded (100.0%)" in out
    assert "4 episodes are equal to the last bit" in out
