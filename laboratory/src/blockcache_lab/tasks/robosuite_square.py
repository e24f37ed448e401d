"""The clean expert for Square: its action follows from what is seen now, so that a policy can imitate it from anywhere.

It keeps no phase. How far the hand is from where it has to be says how high it stays (a funnel over the handle, another over
the peg); fingers and nut say whether it is held. A nut that was missed or lost is taken again.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.spatial.transform import Rotation

from blockcache.tasks.base import Array, Expert
from blockcache_lab.tasks.robosuite import Robosuite
from blockcache_lab.tasks.robosuite_experts import (
    CLOSED,
    DOWN,
    OPEN,
    Scene,
    ahead,
    nearest,
    turning_effort,
    within_reach,
)

_FIELDS = 14  # numbers of an observation that are the nut's
_HANDLE = 0.06  # metres from the nut's middle to where its handle is held
_OPENED, _HOLDING = 0.07, 0.034  # metres between open fingers, and between those that hold the handle, at most
_ABOVE, _HIGH = 0.1, 0.14  # metres that the hand stays over the handle, and the nut over the peg's middle
_BURIED = 0.1  # and below that where it is around the peg
_TABLE, _LYING = 0.83, 0.865  # heights of a nut on the table, and of one that lies at the peg's foot
_LEVER = 0.03  # metres that a radian is worth
_FAST, _SLOW = 0.9, 0.45  # the largest shift, and that downwards
_STEP, _TURN = 0.05, 0.5  # metres and radians of an action of 1


def expert(task: Robosuite) -> Expert:
    """The expert for the episode that has begun."""
    peg = np.array(task.env.sim.data.body_xpos[task.env.peg1_body_id])
    return lambda seen: _action(Scene.of(seen, _FIELDS), peg)


def _action(scene: Scene, peg: Array) -> Array:
    """To the handle, closing there; with the nut to the peg; away once it lies around it."""
    hand = math.atan2(scene.axes[1, 0], scene.axes[0, 0])
    off = scene.object + ahead(scene.turn, _HANDLE) - scene.hand
    turn = min((nearest(scene.turn - hand, math.pi) + k * math.pi for k in (-1, 0, 1)), key=lambda by: _cost(hand, by))
    gap = float(scene.row[-2] - scene.row[-1])
    if math.dist(scene.object[:2], peg[:2]) < 0.02 and scene.object[2] < _LYING:
        return _moving(scene, np.array([0.0, 0.0, 0.02 if gap > _HOLDING else 0.0]), 0.0, OPEN)
    if _at(off, turn, 1.5) and _HOLDING / 2 < gap < _HOLDING:
        return _carry(scene, peg, hand)
    if gap > _HOLDING / 2 and _at(off, turn, 1 + 10 * max(0.0, _OPENED - gap)):  # sooner or later, once it has begun
        return _moving(scene, off, turn, CLOSED)
    missing = math.hypot(off[0], off[1]) + _LEVER * abs(turn)
    rise = min(_ABOVE, max(0.0, 2 * (missing - 0.012), 3 * (_OPENED - gap)))
    return _moving(scene, off + np.array([0.0, 0.0, rise]), turn, OPEN)


def _carry(scene: Scene, peg: Array, hand: float) -> Array:
    """Up, then over the peg while it turns, then down; what is moved to its place is the nut, however it is held."""
    final = min((k * math.pi / 2 for k in range(-1, 3)), key=lambda turn: turning_effort(turn, scene.turn, hand))
    turn, off = nearest(final - scene.turn, 2 * math.pi), peg - scene.object
    missing = math.hypot(off[0], off[1])
    around = missing < 0.012 and scene.object[2] < peg[2] + _BURIED
    height = -0.03 if around else min(_HIGH, 14 * (missing + _LEVER * abs(turn)) + 0.005)
    lifted = 1.0 if around else min(1.0, max(0.0, (scene.object[2] - _TABLE - 0.02) / 0.08))
    return _moving(scene, np.array([lifted * off[0], lifted * off[1], off[2] + height]), lifted * turn, CLOSED, 2.0)


def _at(off: Array, turn: float, loose: float) -> bool:
    """Whether the fingers are around the handle."""
    return math.hypot(off[0], off[1]) < 0.016 * loose and abs(off[2]) < 0.012 * loose and abs(turn) < 0.25 * loose


def _cost(hand: float, by: float) -> float:
    return abs(by) + 10 * (not within_reach(hand + by))


def _moving(scene: Scene, off: Array, turn: float, grip: float, gain: float = 1.2) -> Array:
    """The action towards a place that far off, turned by `turn`, fingers down: slower the nearer it is, since what changes
    within a few millimetres is hard to imitate."""
    shift = gain * off / _STEP
    shift[:2] *= min(1.0, _FAST / max(1e-9, math.hypot(shift[0], shift[1])))
    shift[2] = min(_FAST, max(-_SLOW, shift[2]))
    hand = math.atan2(scene.axes[1, 0], scene.axes[0, 0])
    wanted = Rotation.from_euler("z", hand + turn).as_matrix() @ DOWN
    spin = Rotation.from_matrix(wanted @ scene.axes.T).as_rotvec() / _TURN
    return np.array([*shift, *spin.clip(-_FAST, _FAST), grip])
