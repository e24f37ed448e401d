"""A scripted expert for ToolHang: the frame into its stand, then the tool's ring over the frame's hook.

The frame lies on the table and has to stand, so the hand turns by a right angle with it: it takes the frame leaning along
the rod, and leans the other way by the rest of that angle once the rod is upright. The tool is lowered flat, its ring around
the hook's tip, let go, and pushed down until it hangs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.spatial.transform import Rotation

from blockcache.tasks.base import Array, Expert
from blockcache_lab.tasks.robosuite import Robosuite
from blockcache_lab.tasks.robosuite_experts import (
    CLEAN,
    CLOSED,
    OPEN,
    Driver,
    Goal,
    Motion,
    Scene,
    grasp,
    held,
    up,
)

_FIELDS = 44  # numbers of an observation that are the objects'
_FRAME, _TOOL = 14, 28  # where their poses begin in it
_LEAN = 0.9  # of the hand that takes the frame, in radians from the vertical
_GRIP = 0.034  # metres from the frame's corner, which is where its pose is, down the rod
_ROD = 0.2207  # to its tip
_HOOK = np.array([0.0875, 0.0, 0.0])  # from the corner to the hook's tip, once the frame stands
_RING = 0.0928  # metres from the tool's middle
_STANDING = np.diag([-1.0, -1.0, 1.0])  # the frame's axes, with its hook along x
_HOLE = np.array([0.0, 0.045, 0.155])  # from the stand's base to the opening that takes the rod
_DEPTH = 0.15  # of it


def expert(task: Robosuite) -> Expert:
    """The expert for the episode that has begun."""
    random = np.random.default_rng((task.seed, 1))
    driver = Driver(_plan(Scene.of(task.observe(), _FIELDS)), CLEAN, random)
    return lambda seen: driver.action(Scene.of(seen, _FIELDS))


def _plan(first: Scene) -> Iterator[Motion]:
    """Take the frame, up, upright over the stand, down, open, away; take the tool, up, over the hook, down,
    open; push the tool down, away."""
    hole = first.object + _HOLE
    yield Motion(_frame_grip(0.1), OPEN, within=0.02)
    yield from grasp(_frame_grip(0.06), _frame_grip(0.0))
    yield Motion(_frame_grip(0.25), CLOSED, steps=15)
    yield Motion(_tip_at(hole + np.array([0.0, -0.05, 0.1])), CLOSED, steps=35)
    yield Motion(_tip_at(hole + up(0.03)), CLOSED, steps=20, careful=True)
    yield Motion(_tip_at(hole + up(0.01)), CLOSED, steps=12, careful=True)
    yield Motion(_tip_at(hole - up(_DEPTH)), CLOSED, steps=32, careful=True)
    yield Motion(_back(0.0), OPEN, steps=6)
    yield Motion(_back(0.15), OPEN, steps=20)
    yield Motion(_tool_grip(0.35), OPEN, within=0.03)
    yield from grasp(_tool_grip(0.1), _tool_grip(0.0))
    yield Motion(_tool_grip(0.3), CLOSED, steps=20)
    yield Motion(_ring_over_hook(0.1), CLOSED, within=0.02)
    yield Motion(_ring_over_hook(0.04), CLOSED, steps=30, careful=True)
    yield Motion(_ring_over_hook(0.009), CLOSED, steps=12, careful=True)
    yield Motion(_back(0.0), OPEN, steps=8)
    for _ in range(3):  # the ring may be stuck aslant: push the tool down
        yield Motion(_over_tool(0.07), CLOSED, steps=10)
        yield Motion(_over_tool(-0.03), CLOSED, steps=14, careful=True)
        yield Motion(_over_tool(0.15), CLOSED, steps=15)
    yield Motion(held(hole + np.array([0.1, 0.0, 0.3]), math.pi), CLOSED)


def _pose(scene: Scene, at: int) -> tuple[Array, Array]:
    """The place and axes of the thing whose pose begins there in an observation."""
    return scene.row[at : at + 3], Rotation.from_quat(scene.row[at + 3 : at + 7]).as_matrix()


def _frame_grip(height: float) -> Goal:
    """Over the frame's grip, the fingers across it and pointing down and along the rod."""

    def goal(scene: Scene) -> tuple[Array, Array]:
        corner, axes = _pose(scene, _FRAME)
        rod, across = -axes[:, 2], -axes[:, 0]
        points = math.sin(_LEAN) * rod - math.cos(_LEAN) * np.cross(across, rod)
        hand = np.stack([np.cross(across, points), across, points], axis=1)
        return corner + _GRIP * rod + up(height), hand

    return goal


def _tip_at(place: Array) -> Goal:
    """The hand goes and turns as it must for the rod to be upright and its tip to be there, whatever the grasp was like."""

    def goal(scene: Scene) -> tuple[Array, Array]:
        corner, axes = _pose(scene, _FRAME)
        turn = _STANDING @ axes.T
        grip = scene.hand - corner
        return place + up(_ROD) + turn @ grip, turn @ scene.axes

    return goal


def _back(distance: float) -> Goal:
    """Away from where the fingers point."""
    return lambda scene: (scene.hand - distance * scene.axes[:, 2], scene.axes)


def _tool_grip(height: float) -> Goal:
    """Over the tool's middle, the fingers across it."""

    def goal(scene: Scene) -> tuple[Array, float]:
        middle, axes = _pose(scene, _TOOL)
        return middle + up(height), math.atan2(axes[1, 0], axes[0, 0]) + math.pi

    return goal


def _ring_over_hook(height: float) -> Goal:
    """The tool goes out from the hook's tip, which is in its ring."""

    def goal(scene: Scene) -> tuple[Array, Array]:
        corner, _ = _pose(scene, _FRAME)
        middle, axes = _pose(scene, _TOOL)
        return scene.hand + corner + _HOOK + up(height) + np.array([_RING, 0.0, 0.0]) - middle, axes.T @ scene.axes

    return goal


def _over_tool(height: float) -> Goal:
    """Over the tool's middle, the fingers across it, once the tool is at the hook."""
    return lambda scene: (_pose(scene, _TOOL)[0] + up(height), math.pi)
