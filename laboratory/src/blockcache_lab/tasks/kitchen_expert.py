"""A scripted expert for Kitchen: four things in an order that the seed draws, each a list of motions of the fingertips.

A motion says where the tips shall be and where they point; differential inverse kinematics makes joint speeds of it, with
the arm's weight held and joints at their ends left out. Handles are gripped and drawn along a circle; all else is pushed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from blockcache.tasks.base import Array, Expert
from blockcache_lab.tasks.kitchen import WANTED, Kitchen

_AHEAD, _UPWARD, _DOWNWARD = (0.0, 1.0, 0.0), (0.0, 1.0, 0.2), (0.0, 1.0, -1.0)  # where the tips can point
_OPEN, _CLOSED = 1.0, -1.0
_TIPS = 0.045  # metres from the simulator's end effector to the fingertips
_ARM = 7  # joints
_ATTEMPTS = 3  # at one thing
_STEP = 0.16  # radians of an action of 1
_GAIN = 1.5  # beyond what would bring the tips there: the arm falls short
_TURN = 0.15  # radians a step, at most
_TURN_WEIGHT = 0.3  # of an error of a radian, beside one of a metre
_DAMPING = 1e-3
_TO_REST = 0.1  # of the way back to the first posture, as far as the tips stay where they are
_MARGIN = 0.03  # radians before a joint's end


@dataclass(frozen=True)
class Motion:
    """Where the tips shall be, until they are within so many metres or after so many steps.

    speed: metres a step at most; against something that resists, it is how hard the arm pushes.
    """

    tips: Array
    grip: float = _CLOSED
    point: tuple[float, float, float] = _AHEAD
    within: float = 0.03
    steps: int = 60
    speed: float = 0.1


def expert(task: Kitchen) -> Expert:
    """The expert for the episode that has begun; its last motion is held."""
    motions = _motions(task)
    arm, motion, steps = _Arm(task.env), next(motions), 0

    def act(seen: Array) -> Array:
        nonlocal motion, steps
        while steps >= motion.steps or arm.left(motion) < motion.within:
            following = next(motions, None)
            if following is None:
                break
            motion, steps = following, 0
        steps += 1
        return arm.action(motion)

    return act


def _motions(task: Kitchen) -> Iterator[Motion]:
    """Those of one thing after the other; what is not done after all of its motions is tried again."""
    for thing in things(task.seed):
        for _ in range(_ATTEMPTS):
            yield from _PLANS[thing](task.env.data)
            if thing in task.finished:
                break


def things(seed: int) -> list[str]:
    """What is done, in order. The hinge cabinet's open door stands in the way of two others, so it comes after them."""
    chosen: list[str] = np.random.default_rng((seed, 1)).permutation(list(_PLANS))[:WANTED].tolist()
    if "hinge cabinet" in chosen:
        door = chosen.index("hinge cabinet")
        last = max(chosen.index(thing) for thing in ("hinge cabinet", "slide cabinet", "top burner") if thing in chosen)
        chosen[door], chosen[last] = chosen[last], chosen[door]
    return chosen


class _Arm:
    """Turns motions into joint speeds."""

    def __init__(self, env: Any) -> None:
        self._model, self._data = env.model, env.data
        self._site = env.model.site("end_effector").id
        self._rest = self._data.qpos[:_ARM].copy()
        self._ends = self._model.jnt_range[:_ARM].T + np.array([[_MARGIN], [-_MARGIN]])
        self._stiffness = self._model.actuator_gainprm[:_ARM, 0]

    def left(self, motion: Motion) -> float:
        """Metres from the tips to where they shall be."""
        return float(np.linalg.norm(motion.tips - self._tips))

    @property
    def _axes(self) -> Array:
        axes: Array = self._data.site_xmat[self._site].reshape(3, 3)
        return axes

    @property
    def _tips(self) -> Array:
        tips: Array = self._data.site_xpos[self._site] + _TIPS * self._axes[:, 2]
        return tips

    def action(self, motion: Motion) -> Array:
        shift = _shortened(_GAIN * (motion.tips - self._tips), motion.speed)
        turn = _shortened(Rotation.from_matrix(_pointing(motion.point) @ self._axes.T).as_rotvec(), _TURN)
        weight = self._data.qfrc_bias[:_ARM] / self._stiffness  # what holds the arm where it is
        joints = (self._joints(np.array([*shift, *(_TURN_WEIGHT * turn)])) + weight) / _STEP
        slower = max(1.0, float(np.abs(joints).max()))  # all alike, so that the tips keep their direction
        return np.array([*joints / slower, motion.grip, motion.grip])

    def _joints(self, wanted: Array) -> Array:
        """Radians of each joint that move the tips as wanted; joints that would leave their range are held."""
        import mujoco

        jacobian = np.zeros((6, self._model.nv))
        mujoco.mj_jac(
            self._model, self._data, jacobian[:3], jacobian[3:], self._tips, self._model.site_bodyid[self._site]
        )
        jacobian[3:] *= _TURN_WEIGHT
        place, (low, high) = self._data.qpos[:_ARM], self._ends
        free = np.ones(_ARM, dtype=bool)
        while True:
            moving = jacobian[:, :_ARM] * free
            inverse = moving.T @ np.linalg.inv(moving @ moving.T + _DAMPING * np.eye(6))
            back = (np.eye(_ARM) - inverse @ moving) @ (_TO_REST * (self._rest - place))
            joints: Array = inverse @ wanted + free * back
            beyond = free & (((place < low) & (joints < 0)) | ((place > high) & (joints > 0)))
            if not beyond.any():
                return joints
            free &= ~beyond


def _microwave(data: Any) -> Iterator[Motion]:
    return _door(data, "microhandle_site", "microwave", _vector(0.0, 0.04, 0.0), -0.8)


def _hinge_cabinet(data: Any) -> Iterator[Motion]:
    return _door(data, "hinge_site2", "right_hinge_cabinet", _vector(0.0, 0.02, -0.05), 1.4)


def _door(data: Any, handle: str, hinge: str, grasp: Array, angle: float) -> Iterator[Motion]:
    """Around the handle, close, along its circle, open, away. The hand turns with a door that opens far."""
    held, axis = data.site(handle).xpos + grasp, data.joint(hinge).xanchor.copy()
    angle -= float(data.joint(hinge).qpos[0])  # a door that slipped out of the hand may be half open
    yield Motion(held - _vector(0.0, 0.13, 0.0), _OPEN)
    yield Motion(held, _OPEN, within=0.012, steps=30, speed=0.04)
    yield Motion(held, within=0.0, steps=5)
    place = held
    for part in np.linspace(0, angle, max(1, round(abs(angle) / 0.1)) + 1)[1:]:
        place = axis + Rotation.from_euler("z", part).apply(held - axis)
        towards = (0.5 * math.sin(part / 2), 1.0, 0.0) if angle > 0 else _AHEAD
        yield Motion(place, point=towards, within=0.04, steps=8, speed=0.05)
    yield Motion(place, _OPEN, within=0.0, steps=4)
    yield Motion(place + _vector(0.02, -0.13, 0.0), _OPEN, within=0.04, steps=15)


def _slide_cabinet(data: Any) -> Iterator[Motion]:
    handle = data.site("slide_site").xpos + _vector(0.0, 0.0, -0.06)
    yield Motion(handle + _vector(-0.09, -0.14, 0.0))
    yield Motion(handle + _vector(-0.09, 0.02, 0.0), within=0.02, steps=20, speed=0.05)
    yield Motion(handle + _vector(0.32, 0.02, 0.0), steps=14, speed=0.05)
    yield Motion(handle + _vector(0.2, -0.14, 0.0), within=0.05, steps=15)
    yield Motion(_vector(-0.25, 0.3, 2.35), within=0.1, steps=20)  # the arm is folded otherwise on the other side


def _light_switch(data: Any) -> Iterator[Motion]:
    lever = data.site("light_site").xpos.copy()
    yield Motion(lever + _vector(0.08, -0.11, 0.0))
    yield Motion(lever + _vector(0.07, -0.01, 0.0), within=0.015, steps=20, speed=0.04)
    yield Motion(lever + _vector(-0.095, 0.0, 0.0), within=0.02, steps=18, speed=0.04)
    yield Motion(lever + _vector(-0.095, -0.13, 0.0), within=0.04, steps=15)


def _burner(knob: str) -> Callable[[Any], Iterator[Motion]]:
    def plan(data: Any) -> Iterator[Motion]:
        """The knob's upper end is pushed to the right, from aside and then down."""
        middle = data.site(knob).xpos.copy()
        yield Motion(middle + _vector(-0.055, -0.12, 0.03), point=_UPWARD)
        yield Motion(middle + _vector(-0.05, 0.0, 0.033), point=_UPWARD, within=0.012, steps=25, speed=0.04)
        for degrees in (-20, 20, 60, 80):
            turn = math.radians(degrees)
            pushed = middle + _vector(0.06 * math.sin(turn), 0.0, 0.04 * math.cos(turn))
            yield Motion(pushed, point=_UPWARD, within=0.02, steps=6, speed=0.15)
        yield Motion(middle + _vector(0.03, -0.14, 0.0), point=_UPWARD, within=0.04, steps=15)

    return plan


def _kettle(data: Any) -> Iterator[Motion]:
    """Pushed at its foot: higher up it would fall over."""
    x = data.site("kettle_site").xpos[0]
    yield Motion(_vector(x, 0.16, 1.86), point=_DOWNWARD, within=0.05)
    yield Motion(_vector(x, 0.17, 1.70), point=_DOWNWARD, steps=30, speed=0.05)
    yield Motion(_vector(x, 0.47, 1.70), point=_DOWNWARD, steps=40, speed=0.04)
    yield Motion(_vector(x, 0.30, 1.72), point=_DOWNWARD, within=0.06, steps=20)
    yield Motion(_vector(x, 0.22, 1.95), within=0.1, steps=20)


_PLANS: dict[str, Callable[[Any], Iterator[Motion]]] = {
    "microwave": _microwave,
    "kettle": _kettle,
    "bottom burner": _burner("knob2_site"),
    "top burner": _burner("knob4_site"),
    "light switch": _light_switch,
    "slide cabinet": _slide_cabinet,
    "hinge cabinet": _hinge_cabinet,
}


def _vector(x: float, y: float, z: float) -> Array:
    return np.array([x, y, z])


def _shortened(vector: Array, most: float) -> Array:
    return vector * min(1.0, most / max(float(np.linalg.norm(vector)), 1e-9))


def _pointing(direction: tuple[float, float, float]) -> Array:
    """The hand's axes where the tips point there and the fingers open along x."""
    z = np.array(direction) / np.linalg.norm(direction)
    y = np.array([1.0, 0.0, 0.0]) - z[0] * z
    y /= np.linalg.norm(y)
    return np.stack([np.cross(y, z), y, z], axis=1)
