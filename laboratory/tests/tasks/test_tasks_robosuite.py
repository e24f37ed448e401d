"""robosuite: Robomimic's observations, the same episode every time, experts that succeed in every style."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import expert_factory, make_task, task_names, task_spec
from blockcache_lab.tasks import mujoco_scenes

NAMES = tuple(name for name in task_names() if name.startswith("robosuite-"))


@pytest.fixture
def make() -> Iterator[Callable[[str], Any]]:
    """Makes simulators that are closed at the end."""
    pytest.importorskip("robosuite", reason='needs the extra "robosuite" of blockcache-lab')
    made: list[Any] = []

    def one(name: str) -> Any:
        made.append(make_task(name))
        return made[-1]

    yield one
    for task in made:
        task.close()


def moved(task: Any, seed: int, steps: int = 12) -> np.ndarray:
    """What is seen while the expert begins."""
    seen = [task.reset(seed)]
    act = expert_factory(task.spec.name)(task)
    for _ in range(steps):
        task.step(act(seen[-1]))
        seen.append(task.observe())
    return np.stack(seen)


def test_three_scenes_are_shown_by_one_expert_or_by_six_and_two_by_one() -> None:
    scenes = {f"robosuite-{scene}-{who}" for scene in ("lift", "can", "square") for who in ("ph", "mh")}
    assert set(NAMES) == {*scenes, "robosuite-tool-hang-ph", "robosuite-transport-ph"}


def test_demonstrations_of_square_from_before_its_quaternion_kept_its_sign_no_longer_fit() -> None:
    versions = {name: task_spec(name).version for name in task_names()}
    assert {name for name, version in versions.items() if version != 1} == {
        "robosuite-square-ph",
        "robosuite-square-mh",
    }


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("lift-ph", 19), ("can-ph", 23), ("square-mh", 23), ("tool-hang-ph", 53), ("transport-ph", 59)],
)
def test_same_seed_same_episode_whatever_was_before(name: str, numbers: int, make: Callable[[str], Any]) -> None:
    task = make(f"robosuite-{name}")
    first = moved(task, 100_000)
    other = moved(task, 100_001)
    np.testing.assert_array_equal(moved(task, 100_000), first)
    assert first.shape == (13, numbers)
    assert first.dtype == np.float32
    assert np.abs(first[0] - other[0]).max() > 1e-3


def test_a_task_goes_on_with_the_simulator_of_one_that_was_closed(make: Callable[[str], Any]) -> None:
    """Its contacts, grasps among them, leave no trace: whole episodes are those of a new simulator."""
    new = make("robosuite-lift-ph")
    first = moved(new, 7, steps=60)
    assert new.success  # it was grasped
    used, simulator = make("robosuite-lift-ph"), new.env
    moved(used, 8, steps=60)
    given_back = used.env
    used.close()
    used.close()  # twice is once
    again = make("robosuite-lift-ph")
    assert again.env is given_back is not simulator
    np.testing.assert_array_equal(moved(again, 7, steps=60), first)


def test_one_that_raised_in_mid_episode_leaves_no_trace(
    make: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back to the idle ones in the middle of an action, its state destroyed, and is as good as new there."""
    task = make("robosuite-lift-ph")
    first = moved(task, 7, steps=60)
    moved(task, 8, steps=30)  # the cube is being grasped
    env, steps = task.env, iter(range(3))

    def raises() -> None:
        if next(steps, None) is None:
            env.sim.data.qpos[:] = np.nan
            env.sim.data.qacc_warmstart[:] = np.nan
            raise RuntimeError("the simulation has diverged")
        forward()

    forward = env.sim.step2
    with monkeypatch.context() as broken:
        broken.setattr(env.sim, "step2", raises)
        with pytest.raises(RuntimeError, match="diverged"):
            task.step(np.ones(7))
    task.close()
    again = make("robosuite-lift-ph")
    assert again.env is env
    np.testing.assert_array_equal(moved(again, 7, steps=60), first)


def test_the_observation_is_in_robomimics_order(make: Callable[[str], Any]) -> None:
    task = make("robosuite-lift-ph")
    seen = task.reset(4)
    data = task.env.sim.data
    np.testing.assert_allclose(seen[:3], data.body_xpos[task.env.cube_body_id], atol=1e-6)
    np.testing.assert_allclose(seen[10:13], data.site_xpos[task.env.robots[0].eef_site_id["right"]], atol=1e-6)
    np.testing.assert_allclose(np.abs(seen[7:10]), np.abs(seen[10:13] - seen[:3]), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(seen[13:17]), 1, atol=1e-5)
    assert seen[17] > 0 > seen[18]  # both fingers, which are open


def test_the_observation_of_two_arms_is_in_robomimics_order(make: Callable[[str], Any]) -> None:
    task = make("robosuite-transport-ph")
    seen, group = task.reset(4), task.env.transport
    places = [group.payload_pos, group.trash_pos, group.lid_handle_pos, group.target_bin_pos, group.trash_bin_pos]
    np.testing.assert_allclose(seen[[[at, at + 1, at + 2] for at in (0, 7, 14, 21, 24)]], places, atol=1e-6)
    hands = [task.env.sim.data.site_xpos[robot.eef_site_id["right"]] for robot in task.env.robots]
    np.testing.assert_allclose(seen[[[41, 42, 43], [50, 51, 52]]], hands, atol=1e-6)
    assert not seen[27:29].any()  # nothing is in its bin


def test_the_observation_of_frame_and_tool_is_in_robomimics_order(make: Callable[[str], Any]) -> None:
    task = make("robosuite-tool-hang-ph")
    seen, data = task.reset(4), task.env.sim.data
    sites, geoms, bodies = task.env.obj_site_id, task.env.obj_geom_id, task.env.obj_body_id
    np.testing.assert_allclose(seen[:3], data.geom_xpos[geoms["stand_base"]], atol=1e-6)
    np.testing.assert_allclose(seen[14:17], data.site_xpos[sites["frame_intersection_site"]], atol=1e-6)
    np.testing.assert_allclose(seen[28:31], data.body_xpos[bodies["tool"]], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(seen[7:10]), np.linalg.norm(seen[44:47] - seen[:3]), atol=1e-5)
    assert not seen[42:44].any()  # neither assembled nor hung


def test_actions_of_two_arms_are_along_the_worlds_axes(make: Callable[[str], Any]) -> None:
    task = make("robosuite-transport-ph")
    first, along_x = task.reset(0), np.zeros(14)
    along_x[[0, 7]] = 0.5, -0.5
    for _ in range(5):
        task.step(along_x)
    moved_by = (task.observe() - first)[[[41, 42, 43], [50, 51, 52]]]
    assert moved_by[0, 0] > 0.02 > -0.02 > moved_by[1, 0]
    assert np.abs(moved_by[:, 1:]).max() < 0.01
    with pytest.raises(TaskError, match="14 finite numbers"):
        task.step(np.zeros(7))


def test_both_arms_begin_with_what_is_theirs(make: Callable[[str], Any]) -> None:
    """The first goes over the lid and holds its handle, the second over the trash."""
    task = make("robosuite-transport-ph")
    task.reset(0)
    act = expert_factory("robosuite-transport-ph")(task)
    for _ in range(64):
        task.step(act(task.observe()))
    seen = task.observe()
    assert seen[16] > 0.98  # the lid's handle is lifted from 0.976
    assert np.linalg.norm(seen[50:53] - seen[7:10]) < 0.03
    assert max(seen[48], seen[57]) < 0.022  # both grippers hold something


def test_the_frame_is_taken_first(make: Callable[[str], Any]) -> None:
    task = make("robosuite-tool-hang-ph")
    before = task.reset(0)
    act = expert_factory("robosuite-tool-hang-ph")(task)
    for _ in range(85):
        task.step(act(task.observe()))
    seen = task.observe()
    assert seen[16] > before[16] + 0.05  # the frame is lifted; the tool and the stand are where they were
    assert np.linalg.norm(seen[28:30] - before[28:30]) < 0.005


@pytest.mark.parametrize("seed", range(6))  # of each style one
def test_every_style_lifts_the_cube(seed: int, make: Callable[[str], Any]) -> None:
    task = make("robosuite-lift-mh")
    task.reset(seed)
    act = expert_factory("robosuite-lift-mh")(task)
    while not task.done:
        action = act(task.observe())
        assert np.abs(action).max() <= 1
        task.step(action)
    assert task.success
    assert task.score == 1.0


@pytest.mark.parametrize("loses", [False, True])
def test_the_clean_expert_of_square_puts_the_nut_on_its_peg_even_if_it_loses_it(
    loses: bool, make: Callable[[str], Any]
) -> None:
    task = make("robosuite-square-ph")
    table = task.reset(1)[2] - 0.06  # it falls onto it
    lost = not loses
    while not task.done:
        action = expert_factory("robosuite-square-ph")(task)(task.observe())  # made anew: it keeps no phase
        assert np.abs(action).max() <= 1
        task.step(action)
        if not lost and task.observe()[2] > table + 0.06:
            lost = True
            for _ in range(8):
                task.step(np.array([0, 0, 0, 0, 0, 0, -1.0]))
            assert task.observe()[2] < table + 0.02
    assert lost
    assert task.success


def test_the_nut_is_seen_from_the_hand_without_jumps(make: Callable[[str], Any]) -> None:
    """In robosuite the sign of that quaternion changes at every touch; the rotation is the same."""
    task = make("robosuite-square-ph")
    seen = moved(task, 3, steps=70)
    theirs = task.env._get_observations()["SquareNut_to_robot0_eef_quat"]
    assert np.abs(np.diff(seen, axis=0)).max() < 0.2
    assert abs(theirs @ seen[-1, 10:14]) == pytest.approx(1, abs=1e-5)


def test_styles_differ_and_the_clean_expert_has_one(make: Callable[[str], Any]) -> None:
    clean, mixed = make("robosuite-lift-ph"), make("robosuite-lift-mh")
    np.testing.assert_array_equal(moved(clean, 6), moved(mixed, 6))  # the first of six
    assert np.abs(moved(clean, 11) - moved(mixed, 11)).max() > 0.01  # the clumsiest


def test_useless_actions_and_pictures_are_refused(make: Callable[[str], Any]) -> None:
    task = make("robosuite-lift-ph")
    with pytest.raises(TaskError, match="has not begun"):
        task.step(np.zeros(7))
    task.reset(0)
    with pytest.raises(TaskError, match="7 finite numbers"):
        task.step(np.full(7, np.nan))
    with pytest.raises(TaskError, match="there is no picture"):
        task.render()


def test_a_mujoco_that_is_too_new_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", SimpleNamespace(__version__="4.0.1"))
    with pytest.raises(TaskError, match=r"needs a MuJoCo below 4\.0, got 4\.0\.1"):
        make_task("robosuite-can-ph")


@pytest.mark.parametrize("name", ["lift", "tool-hang", "transport"])
def test_a_missing_simulator_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mujoco_scenes, "_IDLE", defaultdict(list))  # none that was built before
    monkeypatch.setitem(sys.modules, "robosuite", None)
    monkeypatch.setitem(sys.modules, "mujoco", SimpleNamespace(__version__="3.3.0"))
    with pytest.raises(TaskError, match=r'"blockcache-lab\[robosuite\]"'):
        make_task(f"robosuite-{name}-ph")
