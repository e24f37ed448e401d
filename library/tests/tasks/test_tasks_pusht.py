"""Push-T: the same episode every time, the demonstrations' physics, the score of Diffusion Policy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import make_task, rollout, task_spec
from repository import SHARED

DEMOS = SHARED / "data" / "pusht" / "pusht_cchi_v7_lowdim.npz"
needs_demos = pytest.mark.skipif(not DEMOS.exists(), reason="the public demonstrations are not here")


@pytest.fixture
def task() -> Any:
    pytest.importorskip("gym_pusht")
    task = make_task("pusht")
    yield task
    task.close()


@pytest.fixture(scope="module")
def demos() -> dict[str, Any]:
    with np.load(DEMOS) as file:
        return {name: file[name] for name in file.files}


def towards_block(obs: Any, chunk: int) -> Any:
    """Walks at the block's first keypoint, a little further in each chunk: there is contact."""
    steps = np.linspace(0, 1.5, 4)[None, :, None]
    agent, goal = obs[:, -1:, 18:], obs[:, -1:, :2]
    return np.clip(agent + (goal - agent) * steps, 0, 512)


def test_unknown_task_is_refused() -> None:
    with pytest.raises(TaskError, match=r"unknown task 'tennis'; known tasks are .*pusht"):
        make_task("tennis")
    with pytest.raises(TaskError, match="unknown task 'tennis'"):
        task_spec("tennis")


def test_missing_simulator_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gym_pusht", "gym_pusht.envs", "gym_pusht.envs.pusht"):
        monkeypatch.setitem(sys.modules, name, None)
    assert task_spec("pusht").obs_dim == 20  # facts need no simulator
    with pytest.raises(TaskError, match=r'"blockcache\[pusht\]"'):
        make_task("pusht")


def test_same_seed_same_episode(task: Any) -> None:
    def episode(seed: int) -> Any:
        seen = [task.reset(seed)]
        for target in np.random.default_rng(0).uniform(100, 400, size=(40, 2)):
            task.step(target)
            seen.append(task.observe())
        return np.stack(seen), task.score

    first, score = episode(100_000)
    episode(100_001)
    again, score_again = episode(100_000)
    assert first.shape == (41, 20)
    assert first.dtype == np.float32
    assert score == score_again
    np.testing.assert_array_equal(first, again)
    assert np.abs(first[0] - episode(100_001)[0][0]).max() > 1
    assert np.abs(first[-1, :18] - first[0, :18]).max() > 1  # the block was pushed, so this tests contact too


def test_set_state_is_exact_where_the_simulators_own_reset_is_not(task: Any) -> None:
    state = np.array([60.0, 70.0, 300.0, 200.0, 1.0])
    task.set_state(state)
    np.testing.assert_allclose(task.state, state, atol=1e-9)
    wrong, _ = task._env.reset(options={"reset_to_state": state})
    assert np.abs(wrong[2:4] - state[2:4]).max() > 1  # the trap is still there


def test_set_state_leaves_nothing_of_the_episode_before(task: Any) -> None:
    state = np.array([200.0, 150.0, 256.0, 220.0, 0.3])

    def path() -> Any:
        return np.stack([(task.step(np.array([300.0, 300.0])), task.state)[1] for _ in range(10)])

    task.set_state(state)
    first = path()
    task.set_state(state)
    np.testing.assert_array_equal(first, path())


def test_observation_turns_the_keypoints_with_the_block(task: Any) -> None:
    upright = task.set_state(np.array([60.0, 70.0, 300.0, 200.0, 0.0]))
    turned = task.set_state(np.array([60.0, 70.0, 300.0, 200.0, np.pi / 2]))
    assert upright[18:].tolist() == [60, 70]
    local = upright[:18].reshape(9, 2) - (300, 200)
    quarter = np.stack((-local[:, 1], local[:, 0]), axis=1)
    np.testing.assert_allclose(turned[:18].reshape(9, 2) - (300, 200), quarter, atol=1e-3)


@needs_demos
def test_observation_is_that_of_the_demonstrations(task: Any, demos: dict[str, Any]) -> None:
    from blockcache.tasks.pusht import observation

    rows = np.random.default_rng(0).choice(len(demos["state"]), 500, replace=False)
    ours = np.stack([observation(demos["state"][i]) for i in rows])
    theirs = np.concatenate((demos["keypoint"][rows].reshape(-1, 18), demos["state"][rows, :2]), axis=1)
    assert np.quantile(np.abs(ours - theirs), 0.99) < 0.05


@needs_demos
@pytest.mark.parametrize("episode", [0, 1, 42, 120, 186, 205])  # the last three start in contact
def test_replayed_demonstration_reproduces_its_block_path(task: Any, demos: dict[str, Any], episode: int) -> None:
    ends = demos["episode_ends"]
    start, stop = (0 if episode == 0 else ends[episode - 1]), ends[episode]
    states, actions = demos["state"][start:stop], demos["action"][start:stop]
    task.set_state(states[0])
    replayed = [task.state]
    for action in actions[:-1]:
        task.step(action)
        replayed.append(task.state)
    assert np.abs(np.stack(replayed)[:, 2:4] - states[:, 2:4]).max() < 0.1
    task.step(actions[-1])
    assert task.score > 0.9


@pytest.mark.parametrize(
    ("coverages", "score", "success", "done"),
    [
        ([0.2, 0.475, 0.1], 0.5, False, False),  # the best counts, not the last
        ([0.2, 0.9499], 0.9499 / 0.95, False, False),
        ([0.95], 1.0, True, True),  # exactly enough is enough
        ([0.97, 0.0], 1.0, True, True),
        ([0.0] * 299, 0.0, False, False),
        ([0.0] * 300, 0.0, False, True),
    ],
)
def test_score(
    task: Any,
    monkeypatch: pytest.MonkeyPatch,
    coverages: list[float],
    score: float,
    success: bool,
    done: bool,
) -> None:
    task.reset(100_000)
    remaining = iter(coverages)
    monkeypatch.setattr(task._env, "_get_coverage", lambda: next(remaining))
    for _ in coverages:
        task.step(np.array([256.0, 256.0]))
    assert task.score == pytest.approx(score, abs=1e-12)
    assert (task.success, task.done) == (success, done)
    task.reset(100_000)
    assert (task.score, task.success, task.done) == (0.0, False, False)


def test_coverage_is_full_on_the_goal(task: Any) -> None:
    task.set_state(np.array([50.0, 50.0, 256.0, 256.0, np.pi / 4]))
    assert not task.success
    task.step(np.array([50.0, 50.0]))
    assert task.success
    assert task.score == 1.0


def test_refused_states_and_actions(task: Any) -> None:
    with pytest.raises(TaskError, match="call reset first"):
        task.step(np.zeros(2))
    task.reset(1)
    with pytest.raises(TaskError, match="2 finite numbers"):
        task.step(np.zeros(3))
    with pytest.raises(TaskError, match="2 finite numbers"):
        task.step(np.array([0.0, np.nan]))
    with pytest.raises(TaskError, match="5 finite numbers"):
        task.set_state(np.zeros(4))


def test_rollout_in_a_batch_is_that_of_each_seed_alone() -> None:
    pytest.importorskip("gym_pusht")
    seeds = [100_000, 100_001, 100_002]
    settings: dict[str, Any] = {"n_obs_steps": 2, "n_action_steps": 4}
    together = rollout(lambda: make_task("pusht"), towards_block, seeds, **settings)
    for seed, record in zip(seeds, together, strict=True):
        (alone,) = rollout(lambda: make_task("pusht"), towards_block, [seed], **settings)
        assert (record.seed, record.score, record.steps, record.error) == (seed, alone.score, 300, None)
        np.testing.assert_array_equal(record.actions, alone.actions)
    assert len({record.score for record in together}) > 1


def test_failing_simulator_is_recorded() -> None:
    pytest.importorskip("gym_pusht")
    made: list[Any] = []

    def factory() -> Any:
        made.append(make_task("pusht"))
        if len(made) == 2:
            made[-1]._env.step = lambda action: 1 / 0
        return made[-1]

    good, bad = rollout(factory, towards_block, [100_000, 100_001], n_obs_steps=2, n_action_steps=4)
    assert (bad.error, bad.score, bad.steps) == ("ZeroDivisionError: division by zero", None, 0)
    assert (good.error, good.steps) == (None, 300)


def test_render_is_a_picture(task: Any) -> None:
    task.reset(100_000)
    picture = task.render()
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert picture.std() > 1


def test_the_score_is_the_same_to_the_last_digit_in_whatever_order_the_shapes_come(monkeypatch):
    """pymunk keeps the block's shapes in a set, whose order differs from process to process."""

    def scores():
        task, found = make_task("pusht"), []
        for place in np.random.default_rng(0).uniform((200, 200, 0.3), (320, 320, 1.3), (40, 3)):
            task.set_state(np.array([40.0, 40.0, *place]))
            task.step(np.array([40.0, 40.0]))
            found.append(task.score)
        task.close()
        return found

    import pymunk

    shapes = pymunk.Body.shapes.fget
    orders = []
    for turned in (False, True):
        ordered = property(lambda body, turned=turned: sorted(shapes(body), key=lambda one: one.area, reverse=turned))
        monkeypatch.setattr(pymunk.Body, "shapes", ordered)
        orders.append(scores())
    assert orders[0] == orders[1]
    assert 0 < min(orders[0]) < max(orders[0])
