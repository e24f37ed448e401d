"""ManiSkill: the same episode every time whatever was before it, its planner behind `demonstrate`, no picture ever drawn.

Its motion planner needs numpy below 2, so the simulator is not in the environment that `make` sets up: where it is not
installed, only what can be known without it is tested. docs/evaluate.md says how to get an environment with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import expert_factory, make_task, task_names, task_spec
from blockcache_lab.training import demonstrate

NAMES = tuple(name for name in task_names() if name.startswith("maniskill-"))


@pytest.fixture
def make() -> Iterator[Callable[[str], Any]]:
    """Makes simulators that are closed at the end."""
    pytest.importorskip("mani_skill")
    made: list[Any] = []

    def one(name: str) -> Any:
        made.append(make_task(name))
        return made[-1]

    yield one
    for task in made:
        task.close()


def flat(observation: dict[str, Any]) -> np.ndarray:
    return np.concatenate([value.ravel() for value in observation.values()])


def waving(task: Any, seed: int) -> np.ndarray:
    """What is seen of an episode with fixed actions."""
    seen = [flat(task.reset(seed))]
    for action in np.random.default_rng(0).uniform(-0.5, 0.5, size=(20, 8)):
        task.step(action)
        seen.append(flat(task.observe()))
    return np.stack(seen)


def grasping(task: Any, seed: int) -> np.ndarray:
    """What is seen of an episode in which the planner's actions are done, a little noisily."""
    seen = [flat(task.reset(seed))]
    planned = np.stack(task.plan())
    for action in planned + np.random.default_rng(seed).normal(0, 0.02, planned.shape):
        task.step(action)
        seen.append(flat(task.observe()))
    return np.stack(seen)


def test_the_four_tasks_of_the_paper_are_known() -> None:
    assert {name.removeprefix("maniskill-") for name in NAMES} == {
        "push-cube",
        "pick-cube",
        "stack-cube",
        "peg-insertion-side",
    }


@pytest.mark.parametrize("name", NAMES)
def test_where_the_simulator_is_missing_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    monkeypatch.delitem(sys.modules, "blockcache_lab.tasks.maniskill", raising=False)
    with pytest.raises(TaskError, match=r'"blockcache-lab\[maniskill\]"'):
        make_task(name)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_episode_whatever_was_before(name: str, make: Callable[[str], Any]) -> None:
    task = make(name)
    first = waving(task, 100_000)
    other = waving(task, 100_001)
    np.testing.assert_array_equal(waving(task, 100_000), first)
    np.testing.assert_array_equal(waving(make(name), 100_000), first)
    assert np.abs(first[0] - other[0]).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_grasp_does_not_depend_on_what_was_grasped_before(name: str, make: Callable[[str], Any]) -> None:
    used = make(name)
    for seed in (150_031, 150_032, 150_033, 150_034, 150_035):
        again = grasping(used, seed)
    np.testing.assert_array_equal(again, grasping(make(name), 150_035))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_seen_is_what_the_task_says(name: str, make: Callable[[str], Any]) -> None:
    task = make(name)
    seen = task.reset(3)
    assert {key: value.shape for key, value in seen.items()} == dict(task_spec(name).shapes)
    assert {value.dtype for value in seen.values()} == {np.dtype(np.float32)}
    assert seen["lang_tokens"].sum() == 1
    np.testing.assert_array_equal(seen["img_tokens"][0, 3:6], 0)  # the hand, as seen from the hand
    before = seen["img_tokens"].copy()
    for _ in range(20):
        task.step(np.append(seen["state_tokens"][:7] + np.float32(0.3), 1.0))
    moved = np.abs(task.observe()["img_tokens"] - before).max(axis=1)
    assert moved[0] > 0.1  # the hand moved


def test_language_tells_the_tasks_apart(make: Callable[[str], Any]) -> None:
    said = np.concatenate([make(name).reset(0)["lang_tokens"] for name in NAMES])
    np.testing.assert_array_equal(said @ said.T, np.eye(len(NAMES)))


def test_an_action_is_where_the_joints_shall_be(make: Callable[[str], Any]) -> None:
    task = make("maniskill-pick-cube")
    task.reset(0)
    wanted = np.array([0.2, -0.1, 0.1, 0.2, 0.1, -0.2, 0.3, 1.0])
    for _ in range(60):
        task.step(wanted)
    np.testing.assert_allclose(task.observe()["state_tokens"], wanted, atol=0.02)


@pytest.mark.parametrize("name", ["maniskill-push-cube", "maniskill-pick-cube", "maniskill-stack-cube"])
def test_the_simulators_own_planner_succeeds_and_success_stays(name: str, make: Callable[[str], Any]) -> None:
    task = make(name)
    task.reset(1)
    assert (task.score, task.success, task.done) == (0.0, False, False)
    act = expert_factory(name)(task)
    while not task.done:
        task.step(act(task.observe()))
    assert (task.score, task.success) == (1.0, True)
    for _ in range(20):
        task.step(np.zeros(8))
    assert task.success
    task.reset(1)
    assert not task.success


def test_demonstrations_hold_what_was_seen_by_name(tmp_path: Any, make: Callable[[str], Any]) -> None:
    demonstrate("maniskill-push-cube", tmp_path / "demos.npz", 2, noise=0.02, progress=False)
    with np.load(tmp_path / "demos.npz") as file:
        steps = file["episode_ends"][-1]
        shapes = task_spec("maniskill-push-cube").shapes
        assert {name: file[name].shape for name in shapes} == {name: (steps, *size) for name, size in shapes.items()}
        assert file["action"].shape == (steps, 8)
        assert np.abs(file["action"][:, :7]).max() < 3  # offsets from home in half radians, not the simulator's radians


@pytest.mark.parametrize("action", [np.zeros(7), np.full(8, np.nan)], ids=["width", "nan"])
def test_bad_actions_are_refused(action: Any, make: Callable[[str], Any]) -> None:
    task = make("maniskill-push-cube")
    with pytest.raises(TaskError, match="call reset first"):
        task.step(np.zeros(8))
    task.reset(0)
    with pytest.raises(TaskError, match="8 finite numbers"):
        task.step(action)


def test_there_is_no_picture_and_nothing_of_the_simulator_stays_changed(make: Callable[[str], Any]) -> None:
    task = make("maniskill-push-cube")
    task.reset(0)
    with pytest.raises(TaskError, match="no picture"):
        task.render()
    import sapien.render
    from sapien.wrapper.actor_builder import ActorBuilder

    assert sapien.render.RenderMaterial.__module__.startswith("sapien")
    assert ActorBuilder.add_box_visual.__module__.startswith("sapien")
