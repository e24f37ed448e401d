"""Kitchen: seven things and a score for four, the same episode every time, an expert that does them in many orders."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import expert_factory, make_task
from blockcache_lab.tasks import mujoco_scenes
from blockcache_lab.tasks.kitchen_expert import things

NAME = "kitchen"
EXTRA = 'needs the extra "kitchen" of blockcache-lab'


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    pytest.importorskip("gymnasium_robotics", reason=EXTRA)
    made = make_task(NAME)
    yield made
    made.close()


@pytest.fixture
def task(shared: Any) -> Any:
    """Building a kitchen takes seconds; every test begins its own episode."""
    shared._success = None
    return shared


def moved(task: Any, seed: int, steps: int = 12) -> np.ndarray:
    """What is seen while the expert begins."""
    seen = [task.reset(seed)]
    act = expert_factory(NAME)(task)
    for _ in range(steps):
        task.step(act(seen[-1]))
        seen.append(task.observe())
    return np.stack(seen)


def test_same_seed_same_episode_whatever_was_before(task: Any) -> None:
    first = moved(task, 100_000)
    other = moved(task, 100_001)
    np.testing.assert_array_equal(moved(task, 100_000), first)
    assert first.shape == (13, 30)
    assert first.dtype == np.float32
    assert 1e-5 < np.abs(first[0] - other[0]).max() < 0.01  # the sensors' noise


def test_a_task_goes_on_with_the_simulator_of_one_that_was_closed(task: Any) -> None:
    """What was opened or moved leaves no trace: a later episode is that of a simulator that nobody used."""
    first = moved(task, 5, steps=80)
    other = make_task(NAME)
    moved(other, 6, steps=80)
    simulator = other.env
    other.close()
    again = make_task(NAME)
    assert again.env is simulator is not task.env
    np.testing.assert_array_equal(moved(again, 5, steps=80), first)
    again.close()


def test_one_that_raised_in_mid_episode_leaves_no_trace(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes back to the idle ones in the middle of an action, its state destroyed, and is as good as new there."""
    first = moved(task, 5, steps=80)
    failing = make_task(NAME)
    moved(failing, 6, steps=80)
    env = failing.env

    def raises(*_: Any) -> None:
        env.data.qpos[:], env.data.qvel[:], env.data.ctrl[:], env.data.qacc_warmstart[:] = [np.nan] * 4
        raise RuntimeError("the simulation has diverged")

    with monkeypatch.context() as broken:
        broken.setattr(env.robot_env, "do_simulation", raises)
        with pytest.raises(RuntimeError, match="diverged"):
            failing.step(np.ones(9))
    failing.close()
    again = make_task(NAME)
    assert again.env is env is not task.env
    np.testing.assert_array_equal(moved(again, 5, steps=80), first)
    again.close()


def test_the_observation_is_where_joints_and_things_are(task: Any) -> None:
    moved(task, 3)
    np.testing.assert_allclose(task.observe(), task.env.data.qpos, atol=0.002)


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_the_expert_does_four_things_in_the_order_it_means_to(seed: int, task: Any) -> None:
    task.reset(seed)
    act, scores = expert_factory(NAME)(task), [task.score]
    while not task.done:
        action = act(task.observe())
        assert np.abs(action).max() <= 1
        task.step(action)
        scores.append(task.score)
    assert task.success
    assert task.finished == things(seed)
    assert sorted(set(scores)) == [0, 0.25, 0.5, 0.75, 1]
    assert scores == sorted(scores)


def test_the_expert_tries_again_what_it_missed(task: Any) -> None:
    seen = task.reset(2)
    act = expert_factory(NAME)(task)
    for step in range(200):
        wanted = act(seen)
        task.step(wanted * (step >= 120))  # the arm stays while the motions of the first thing run out
        seen = task.observe()
    assert task.finished[:1] == things(2)[:1] == ["light switch"]


def test_the_tips_keep_their_direction_when_a_joint_is_at_its_fastest(task: Any) -> None:
    """All joints are slowed alike: one at most is at its end, and the tips still go straight to where they shall be."""
    task.reset(0)
    act, arm = expert_factory(NAME)(task), np.s_[:7]
    fastest = 0
    for _ in range(30):
        wanted = act(task.observe())[arm]
        fastest += int((np.abs(wanted) == 1).sum() == 1)
        assert (np.abs(wanted) == 1).sum() <= 1
        task.step(np.array([*wanted, -1, -1]))
    assert fastest > 0


def test_an_arm_that_stays_scores_nothing_and_its_steps_end(task: Any) -> None:
    task.reset(0)
    for _ in range(task.spec.max_steps):
        assert not task.done
        task.step(np.zeros(9))
    assert task.done
    assert not task.success
    assert task.score == 0


def test_orders_vary_and_leave_the_open_door_for_the_end() -> None:
    orders = [things(seed) for seed in range(300)]
    assert all(len(set(order)) == 4 for order in orders)
    assert len({tuple(order) for order in orders}) > 150
    assert {order[0] for order in orders} == {thing for order in orders for thing in order}
    assert len({order[0] for order in orders}) == 7
    for order in orders:
        for other in {"slide cabinet", "top burner"} & set(order):
            assert "hinge cabinet" not in order[: order.index(other)]


def test_useless_actions_are_refused(task: Any) -> None:
    with pytest.raises(TaskError, match="has not begun"):
        task.step(np.zeros(9))
    task.reset(0)
    with pytest.raises(TaskError, match="9 finite numbers"):
        task.step(np.full(9, np.nan))


def test_a_mujoco_that_is_too_new_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", SimpleNamespace(__version__="4.0.1"))
    with pytest.raises(TaskError, match=r'needs a MuJoCo below 4\.0, got 4\.0\.1; .*"blockcache-lab\[kitchen\]"'):
        make_task(NAME)


def test_a_missing_simulator_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mujoco_scenes, "_IDLE", defaultdict(list))  # none that was built before
    for name in ("gymnasium_robotics", "gymnasium_robotics.envs.franka_kitchen.kitchen_env"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "mujoco", SimpleNamespace(__version__="3.3.0"))
    with pytest.raises(TaskError, match=r'"blockcache-lab\[kitchen\]"'):
        make_task(NAME)
