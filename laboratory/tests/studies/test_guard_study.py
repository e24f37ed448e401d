"""The study of guards: tasks that are changed, and what is counted."""

import itertools

import numpy as np
import pytest

from blockcache_lab.studies.guard import OF, SHIFTS, STALE, ChangedTask, other_tasks

SEED = 170_000


@pytest.fixture
def make():
    pytest.importorskip("gym_pusht", reason="gym-pusht is not installed")
    from blockcache.tasks import make_task

    return lambda **changes: ChangedTask(make_task("pusht"), **changes)


def test_nothing_changed_is_the_task_itself(make):
    plain = make()
    first = plain.reset(SEED)
    np.testing.assert_array_equal(first, plain._task.observe())
    assert plain.spec.name == "pusht"


def test_a_moved_target_is_seen_and_reached_where_it_always_was(make):
    usual, moved = make(), make(moved=60.0)
    first, seen = usual.reset(SEED), moved.reset(SEED)
    np.testing.assert_allclose(seen, first - 60, atol=1e-3)
    np.testing.assert_allclose(moved._task._env.goal_pose - usual._task._env.goal_pose, [60, 60, 0])
    before = moved.state[:2].copy()
    for _ in range(20):
        moved.step(before - 60)  # stay, as the policy sees it
    np.testing.assert_allclose(moved.state[:2], before, atol=1.0)


def test_an_offset_moves_the_block_alone(make):
    np.testing.assert_allclose(make(offset=30.0).reset(SEED) - make().reset(SEED), [*[30, 0] * 9, 0, 0], atol=1e-3)


def test_a_sensor_stands_still_and_goes_on(make):
    task, seen = make(stale=True), []
    task.reset(SEED)
    for tick in range(OF + 1):
        task.step(np.array([100.0 + 3 * tick, 200.0]))
        seen.append(task.observe())
    still = [np.array_equal(one, two) for one, two in itertools.pairwise(seen)]
    assert sum(still) == STALE


def test_other_tasks_are_outside_and_a_guard_s_own_is_not():
    rng = np.random.default_rng(0)
    near, far = ({"obs": rng.normal(size=(128, 2, 3)).astype(np.float32) + offset} for offset in (0, 50))
    one, two = other_tasks({"near": near, "far": far})
    assert one["outside"]["far"] == two["outside"]["near"] == 1.0
    assert one["outside"]["near"] < 0.1


def test_every_shift_can_be_made(make):
    for _, changes in SHIFTS.values():
        assert make(**changes).reset(SEED).shape == (20,)
