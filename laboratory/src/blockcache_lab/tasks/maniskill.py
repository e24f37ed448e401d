"""ManiSkill tabletop manipulation with a Panda arm, as an RDT sees it: the robot's state, three things in the scene as
"image" tokens, the task as its language. No picture is ever drawn, so no Vulkan device is needed.

Joints are given as they differ from the arm's home pose, in units of half a radian; the gripper goes from -1, closed, to 1.
The seed draws where things are; the physics has no randomness. The score of an episode is its success.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError
from blockcache.tasks.base import Array, Expert, TaskSpec
from blockcache_lab.tasks.flagged import Flagged

# Our name -> ManiSkill's, the module of its motion planner, and the members that are what is moved and where to.
TASKS = {
    "maniskill-push-cube": ("PushCube-v1", "push_cube", "obj", "goal_region"),
    "maniskill-pick-cube": ("PickCube-v1", "pick_cube", "cube", "goal_site"),
    "maniskill-stack-cube": ("StackCube-v1", "stack_cube", "cubeA", "cubeB"),
    "maniskill-peg-insertion-side": ("PegInsertionSide-v1", "peg_insertion_side", "peg", "box_hole_pose"),
}
HOME = np.array([0, np.pi / 8, 0, -np.pi * 5 / 8, 0, np.pi * 3 / 4, np.pi / 4])  # of the seven joints
UNIT = 0.5  # radians
_OPEN = 0.04  # where a finger is then, in metres
_DECIMETRES = 10.0  # in a metre: positions then have about the size of the other numbers
_CONTROL_RATE = 20.0  # actions a second
_ANEW = {"reconfigure": True}
"""How a simulator is reset: in a scene that has been used, PhysX remembers in which order bodies touched, and a grasp then
ends a little elsewhere."""


class ManiSkill(Flagged):
    """One ManiSkill simulator."""

    simulator = "ManiSkill"

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(spec)
        self._env = _make(spec)
        self._planner: _Recorded | None = None  # a simulator of its own, made when a plan is asked for
        self._seed = 0
        self._seen: dict[str, Array] = {}

    def reset(self, seed: int) -> dict[str, Array]:
        with _building():
            self._env.reset(seed=int(seed), options=_ANEW)
        self._begin()
        self._seed = int(seed)
        self._seen = self._look()
        return self._seen

    def observe(self) -> dict[str, Array]:
        return self._seen

    def step(self, action: Array) -> None:
        wanted = self._checked(action)
        limits = self._env.action_space
        targets = np.append(HOME + UNIT * wanted[:-1], wanted[-1])
        *_, info = self._env.step(np.clip(targets, limits.low, limits.high).astype(np.float32))
        self._stepped(info["success"])
        self._seen = self._look()

    def render(self) -> npt.NDArray[np.uint8]:
        raise TaskError(
            "ManiSkill scenes are built without visuals here, so that no Vulkan device is needed: there is no picture; "
            "Push-T and Meta-World can be filmed"
        )

    def close(self) -> None:
        self._env = self._planner = None

    def plan(self) -> list[Array]:
        """What ManiSkill's motion planner does in this episode, from its start to its end, as actions of this task. It
        plays in a simulator of its own; an episode that it cannot solve ends where it gave up."""
        if self._planner is None:
            self._planner = _Recorded(_make(self.spec))
        module = importlib.import_module(
            f"mani_skill.examples.motionplanning.panda.solutions.{TASKS[self.spec.name][1]}"
        )
        self._planner.actions.clear()
        with _building(), redirect_stdout(StringIO()):  # it prints where it gives up
            module.solve(self._planner, seed=self._seed)
        return [np.append((targets[:-1] - HOME) / UNIT, targets[-1]) for targets in self._planner.actions]

    def _look(self) -> dict[str, Array]:
        env, task = self._env.unwrapped, TASKS[self.spec.name]
        moved, target = getattr(env, task[2]), getattr(env, task[3])
        hand = env.agent.tcp.pose
        things = [
            _token(hand, hand),
            _token(moved.pose, hand, _sizes(env, "peg_half_sizes")),
            _token(getattr(target, "pose", target), hand, _sizes(env, "box_hole_radii")),
        ]
        joints = env.agent.robot.get_qpos()[0].double().numpy()
        state = np.append((joints[:7] - HOME) / UNIT, joints[7:].mean() * 2 / _OPEN - 1)
        language = np.array([[name == self.spec.name for name in TASKS]])
        found = {
            "state_tokens": state,
            "lang_tokens": language,
            "lang_attn_mask": np.ones(1),
            "img_tokens": np.stack(things),
            "action_mask": np.ones(self.spec.action_dim),
            "ctrl_freqs": np.array([_CONTROL_RATE]),
        }
        return {name: value.astype(np.float32) for name, value in found.items()}


def expert(task: ManiSkill) -> Expert:
    """ManiSkill's motion planner, for the episode that has begun. It plans once and looks at nothing on its way: its actions
    are where the joints shall be, so what was done wrongly before does not add up."""
    planned = task.plan()
    held = planned[-1] if planned else task.observe()["state_tokens"]
    actions = chain(planned, repeat(held))
    return lambda observation: next(actions)


def _make(spec: TaskSpec) -> Any:
    import gymnasium

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*libvulkan")  # nothing is drawn
        import mani_skill.envs  # noqa: F401  # registers its tasks

    with _building():
        return gymnasium.make(
            TASKS[spec.name][0],
            num_envs=1,
            obs_mode="none",
            reward_mode="none",
            control_mode="pd_joint_pos",
            sim_backend="physx_cpu",
            render_backend="none",
        ).unwrapped  # without the limit of steps, which is the task's own here


class _Recorded:
    """A simulator that keeps the actions it is given, as ManiSkill's planner takes one."""

    def __init__(self, env: Any) -> None:
        self.unwrapped = env
        self.actions: list[Array] = []

    def reset(self, seed: int) -> Any:
        return self.unwrapped.reset(seed=seed, options=_ANEW)

    def step(self, action: Array) -> Any:
        self.actions.append(np.array(action, dtype=np.float64))
        return self.unwrapped.step(action)


class _NoMaterial:
    """In the place of a material, of which SAPIEN can make none without a rendering device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return


@contextmanager
def _building() -> Iterator[None]:
    """Scenes that are built meanwhile have bodies, and nothing to see. ManiSkill's `render_backend="none"` alone still makes
    materials, which needs a Vulkan device. Nor is all garbage of Python collected for each of them, which ManiSkill does for
    the sake of a GPU and which takes longer than the building."""
    import sapien.render
    from mani_skill.envs import sapien_env
    from sapien.wrapper import actor_builder, urdf_loader

    builder = actor_builder.ActorBuilder
    with ExitStack() as changed:
        changed.enter_context(patch.object(sapien_env, "gc", SimpleNamespace(collect=lambda: 0)))
        for place in (sapien.render, urdf_loader):
            changed.enter_context(patch.object(place, "RenderMaterial", _NoMaterial))
        for name in dir(builder):
            if name.startswith("add_") and "visual" in name:
                changed.enter_context(patch.object(builder, name, _nothing_to_see))
        yield


def _nothing_to_see(builder: Any, *args: Any, **kwargs: Any) -> Any:
    return builder


def _token(pose: Any, hand: Any, size: Array | None = None) -> Array:
    """(15,): position, as seen from the hand too, two columns of the rotation, and how large it is."""
    matrix = pose.to_transformation_matrix()[0].double().numpy()
    away = matrix[:3, 3] - hand.p[0].double().numpy()
    parts = [_DECIMETRES * matrix[:3, 3], _DECIMETRES * away, matrix[:3, :2].T.ravel()]
    return np.concatenate([*parts, np.zeros(3) if size is None else _DECIMETRES * size])


def _sizes(env: Any, name: str) -> Array | None:
    """What a scene says of the size of something in it, as three numbers; peg and hole differ from seed to seed."""
    value = getattr(env, name, None)
    return None if value is None else np.resize(value.double().numpy(), 3)
