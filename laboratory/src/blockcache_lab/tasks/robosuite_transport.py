"""A scripted expert for Transport: two arms, each with its own list of motions; they meet to hand the hammer over.

The first arm takes the lid off, lays it aside, takes the hammer out and holds it between both. The second throws the trash
into its bin, takes the hammer and lays it into the bin that was cleared. Each waits for what it sees of the other.
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
    DOWN,
    OPEN,
    Driver,
    Goal,
    Motion,
    Scene,
    ahead,
    grasp,
    held,
    nearest,
    up,
)

_FIELDS = 41  # numbers of an observation that are the objects'
_TRASH, _LID, _TARGET_BIN, _TRASH_BIN = (slice(at, at + 3) for at in (7, 14, 21, 24))
_FACING = (math.pi / 2, -math.pi / 2)  # turns of the hands in which the arms begin, and with the hammer along y
_MEETING = np.array([0.0, 0.0, 1.1])  # of the hammer's middle
_GRASPS = (-0.04, 0.06)  # where the hands hold the hammer, in metres along it, from the first arm to the second


def expert(task: Robosuite) -> Expert:
    """The expert for the episode that has begun."""
    first = Scene.of(task.observe(), _FIELDS)
    random = np.random.default_rng((task.seed, 1))
    drivers = [Driver(plan(first), CLEAN, random) for plan in (_giver, _taker)]
    return lambda seen: np.concatenate(
        [driver.action(Scene.of(seen, _FIELDS, arm)) for arm, driver in enumerate(drivers)]
    )


def _giver(first: Scene) -> Iterator[Motion]:
    """Over the lid's handle, down, close, up, aside, down, open; then the same with the hammer, to where arms meet."""
    facing, lid = _FACING[0], first.row[_LID]
    aside = np.array([-0.2, lid[1], lid[2]])

    def lid_at(height: float) -> Goal:
        return lambda scene: (scene.row[_LID] + up(height), facing)

    yield from grasp(lid_at(0.1), lid_at(0.0))
    yield Motion(held(lid + up(0.08), facing), CLOSED, within=0.02, careful=True)
    yield Motion(held(aside + up(0.08), facing), CLOSED, within=0.02, careful=True)
    yield Motion(held(aside - up(0.13), facing), CLOSED, within=0.02, careful=True)
    yield Motion(held(aside - up(0.13), facing), OPEN, steps=6)
    yield Motion(held(aside + up(0.15), facing), OPEN, within=0.05)
    yield Motion(held(lid + up(0.15), facing), OPEN, within=0.05)
    yield from grasp(_hammer(0, 0.15, -0.3), _hammer(0, 0.0, -0.3), closing=12)
    yield Motion(lambda scene: (scene.hand + up(0.1), scene.axes), CLOSED, steps=10, careful=True)
    yield Motion(held(lid + up(0.2), facing), CLOSED, within=0.03)
    there = held(_MEETING + ahead(facing, _GRASPS[0]), _leaning(facing, 0.25))
    yield Motion(there, CLOSED, within=0.02)
    yield Motion(there, CLOSED, until=lambda scene: _fingers(scene, 1) < 0.02)  # until the other holds it, too
    yield Motion(there, CLOSED, steps=4)
    yield Motion(there, OPEN, steps=6)
    yield Motion(held(_MEETING + np.array([0.1, -0.3, 0.15]), facing), OPEN)


def _taker(first: Scene) -> Iterator[Motion]:
    """The trash into its bin; then, once the hammer is there, over it, down, close, wait, away, into the bin, open."""
    facing, bin_ = _FACING[1], first.row[_TARGET_BIN]
    turn = facing + nearest(_yaw(first.row[10:14]), math.pi / 2)
    over_trash_bin = first.row[_TRASH_BIN] + up(0.25)

    def trash_at(height: float) -> Goal:
        return lambda scene: (scene.row[_TRASH] + up(height), turn)

    yield from grasp(trash_at(0.15), trash_at(0.0))
    yield Motion(held(first.row[_TRASH] + up(0.25), facing), CLOSED, within=0.03)
    yield Motion(held(over_trash_bin, facing), CLOSED, within=0.03)
    yield Motion(held(over_trash_bin - up(0.1), facing), CLOSED, within=0.02)
    yield Motion(held(over_trash_bin - up(0.1), facing), OPEN, steps=6)
    yield Motion(held(over_trash_bin, facing), OPEN, within=0.03)
    wait = held(_MEETING + np.array([0.0, 0.25, 0.1]), facing)
    yield Motion(wait, OPEN, until=_given)
    yield from grasp(_hammer(1, 0.12, -0.25), _hammer(1, 0.0, -0.25))
    yield Motion(_hammer(1, 0.0, -0.25), CLOSED, until=lambda scene: _fingers(scene, 0) > 0.03)
    high = _MEETING + np.array([0.0, 0.2, 0.1])
    yield Motion(held(high, facing), CLOSED, within=0.03)
    diagonal = facing + 0.7  # longer than a side
    yield Motion(_hammer_to(bin_ + up(0.3), diagonal), CLOSED, within=0.03)
    yield Motion(_hammer_to(bin_ + up(0.02), diagonal), CLOSED, within=0.02, careful=True)
    yield Motion(lambda scene: (scene.hand, diagonal), OPEN, steps=6)
    yield Motion(_hammer_to(bin_ + up(0.3), diagonal), OPEN)


def _hammer(arm: int, height: float, lean: float = 0.0) -> Goal:
    """Over the arm's place on the hammer, which may hang aslant, with the fingers across it."""

    def goal(scene: Scene) -> tuple[Array, Array]:
        axis = Rotation.from_quat(scene.row[3:7]).as_matrix()[:, 2]
        axis = axis if axis[1] > 0 else -axis  # from the first arm to the second
        turn = math.atan2(axis[1], axis[0]) - math.pi / 2
        return scene.object + _GRASPS[arm] * axis + up(height), _leaning(_FACING[arm] + turn, lean)

    return goal


def _leaning(turn: float, lean: float) -> Array:
    """The axes of a hand whose fingers point down and, by an angle, along y."""
    axes: Array = Rotation.from_euler("zx", [turn, lean]).as_matrix() @ DOWN
    return axes


def _hammer_to(place: Array, turn: float) -> Goal:
    """The hand goes where the hammer that it holds is at its place."""
    return lambda scene: (scene.hand + place - scene.object, turn)


def _given(scene: Scene) -> bool:
    """Whether the first hand holds the hammer where they meet."""
    hand = scene.row[_FIELDS : _FIELDS + 3]
    return bool(np.linalg.norm(hand - _MEETING - ahead(_FACING[0], _GRASPS[0])) < 0.02)


def _fingers(scene: Scene, arm: int) -> float:
    """How far one finger of an arm is from the middle."""
    return float(scene.row[_FIELDS + 9 * arm + 7])


def _yaw(quaternion: Array) -> float:
    return float(Rotation.from_quat(quaternion).as_euler("xyz")[2])
