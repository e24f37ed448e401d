"""Meta-World: the same episode every time whatever was before it, the demonstrations' scene, its own success flag."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import TaskEntry, TaskSpec, expert_factory, make_task, task_names, task_spec
from blockcache.tasks import base as tasks_base
from repository import SHARED

DEMOS = SHARED / "data" / "metaworld"
NAMES = tuple(name for name in task_names() if name.startswith("metaworld-"))


@pytest.fixture
def make() -> Iterator[Callable[[str], Any]]:
    """Makes simulators that are closed at the end."""
    pytest.importorskip("metaworld")
    made: list[Any] = []

    def one(name: str) -> Any:
        made.append(make_task(name))
        return made[-1]

    yield one
    for task in made:
        task.close()


def waving(task: Any, seed: int) -> np.ndarray:
    """What is seen of an episode with fixed actions that reach down to the objects."""
    seen = [task.reset(seed)]
    for action in np.random.default_rng(0).uniform((-1, -1, -1, -1), (1, 1, 0.4, 1), size=(30, 4)):
        task.step(action)
        seen.append(task.observe())
    return np.stack(seen)


def test_the_three_tasks_of_the_paper_are_known() -> None:
    assert set(NAMES) == {"metaworld-assembly", "metaworld-peg-insert-side", "metaworld-pick-place"}


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_episode_whatever_was_before(name: str, make: Callable[[str], Any]) -> None:
    task = make(name)
    first = waving(task, 100_000)
    other = waving(task, 100_001)
    np.testing.assert_array_equal(waving(task, 100_000), first)
    np.testing.assert_array_equal(waving(make(name), 100_000), first)
    assert first.shape == (31, 39)
    assert first.dtype == np.float32
    assert np.abs(first[0] - other[0]).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_goal_is_seen(name: str, make: Callable[[str], Any]) -> None:
    task = make(name)
    goals = np.stack([task.reset(seed)[36:] for seed in range(4)])
    assert np.abs(goals).max() > 0.1
    assert np.ptp(goals, axis=0).max() > 1e-3
    task.step(np.zeros(4))
    np.testing.assert_array_equal(task.observe()[36:], goals[-1])  # not clipped away after the first step


@pytest.mark.parametrize("name", NAMES)
def test_the_simulators_own_expert_succeeds_and_success_stays(name: str, make: Callable[[str], Any]) -> None:
    task = make(name)
    task.reset(0)
    expert = expert_factory(name)(task)
    assert (task.score, task.success, task.done) == (0.0, False, False)
    while not task.done:
        action = expert(task.observe())
        assert np.abs(action).max() <= 1
        task.step(action)
    assert (task.score, task.success) == (1.0, True)
    for _ in range(20):
        task.step(np.array([1.0, -1.0, 1.0, -1.0]))
    assert task.success
    task.reset(0)
    assert not task.success


@pytest.mark.skipif(find_library("EGL") is None, reason="nothing here can draw without a screen")
def test_a_picture_shows_what_the_robot_does(make: Callable[[str], Any]) -> None:
    task = make("metaworld-assembly")
    task.reset(0)
    before = task.render().astype(int)
    assert before.shape == (384, 384, 3)
    assert before.std() > 10  # not one colour
    for _ in range(20):
        task.step(np.array([0.0, 0.0, -1.0, 0.0]))
    changed = np.abs(task.render() - before).max(axis=-1) > 30
    assert 0.001 < changed.mean() < 0.3  # the arm moved, the room did not


def test_an_episode_ends_when_the_steps_are_used_up(make: Callable[[str], Any]) -> None:
    task = make("metaworld-assembly")
    task.reset(0)
    for _ in range(task_spec("metaworld-assembly").max_steps):
        assert not task.done
        task.step(np.zeros(4))
    assert task.done
    assert not task.success


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(not DEMOS.exists(), reason="the demonstrations are not here")
def test_starts_are_like_the_demonstrations(name: str, make: Callable[[str], Any]) -> None:
    with np.load(DEMOS / f"{name.removeprefix('metaworld-')}-v3.npz") as file:
        starts = file["obs"][np.concatenate(([0], file["episode_ends"][:-1]))]  # (50, 39)
    task = make(name)
    ours = np.stack([task.reset(seed) for seed in range(30)])
    centre, reach = (starts.min(0) + starts.max(0)) / 2, np.ptp(starts, axis=0) / 2
    assert (np.abs(ours - centre) <= 1.5 * reach + 2e-3).all()  # its expert fails at some goals: those are missing


@pytest.mark.parametrize("action", [np.zeros(3), np.full(4, np.nan)], ids=["width", "nan"])
def test_bad_actions_are_refused(action: Any, make: Callable[[str], Any]) -> None:
    task = make("metaworld-pick-place")
    with pytest.raises(TaskError, match="call reset first"):
        task.step(np.zeros(4))
    task.reset(0)
    with pytest.raises(TaskError, match="4 finite numbers"):
        task.step(action)


def test_where_nothing_can_draw_the_error_says_what_to_install(make: Callable[[str], Any]) -> None:
    task = make("metaworld-assembly")
    task.reset(0)

    def refuse() -> None:
        raise RuntimeError("no display")

    task._env.render = refuse
    with pytest.raises(TaskError, match=r"MuJoCo cannot draw here \(no display\); install libEGL"):
        task.render()


def test_missing_simulator_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("metaworld", "metaworld.env_dict"):
        monkeypatch.setitem(sys.modules, name, None)
    assert task_spec("metaworld-assembly").obs_dim == 39  # facts need no simulator
    with pytest.raises(TaskError, match=r'"blockcache-lab\[metaworld\]"'):
        make_task("metaworld-assembly")


# ---- tasks of other packages


class Kitchen:
    """Stands for another package's simulator."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec


KITCHEN = TaskEntry(TaskSpec("kitchen", 60, 9, 280, "four things done", "kitchen"), f"{__name__}:Kitchen")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers entry points, name by name, as other packages would."""

    def register(**values: str) -> None:
        points = [EntryPoint(name, f"{__name__}:{value}", "blockcache.tasks") for name, value in values.items()]
        monkeypatch.setattr(tasks_base, "entry_points", lambda group: points if group == "blockcache.tasks" else [])

    return register


def test_another_package_can_bring_a_task(registered: Callable[..., None]) -> None:
    registered(kitchen="KITCHEN", broken="NOTHING")  # whatever is wrong with the other one
    assert {"kitchen", "broken", "pusht"} <= set(task_names())
    assert task_spec("kitchen").action_dim == 9
    assert isinstance(make_task("kitchen"), Kitchen)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("broken", "NOTHING", "cannot be loaded"),
        ("oven", "KITCHEN", "not a TaskEntry of that name"),
        ("oven", "Kitchen", "not a TaskEntry of that name"),
        ("pusht", "KITCHEN", "registered more than once"),
    ],
)
def test_a_task_that_is_registered_badly_is_refused(
    name: str, value: str, message: str, registered: Callable[..., None]
) -> None:
    registered(**{name: value})
    with pytest.raises(TaskError, match=message):
        task_spec(name)
