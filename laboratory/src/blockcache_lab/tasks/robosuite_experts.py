"""Scripted experts for Lift, Can and Square: a list of motions each, and six styles in which they are done.

A motion says where the hand shall be, how it is turned, and whether the gripper is closed; it is over when the hand is
there, after a number of steps, or when something is seen. An expert knows the observation and where the scene's fixed parts
are. The clean one for Square is in robosuite_square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.spatial.transform import Rotation

from blockcache.tasks.base import Array, Expert
from blockcache_lab.tasks.robosuite import Robosuite, scene_of

_STEP, _TURN = 0.05, 0.5  # metres and radians of an action of 1
DOWN = np.diag([1.0, -1.0, -1.0])  # the hand's axes where its fingers open along y
OPEN, CLOSED = -1.0, 1.0
_PATIENCE = 60  # steps that a motion may take at full speed
_WRIST = (-1.8, 3.0)  # turns of the hand that the last joint can bear
_GAIN = 4.0  # beyond what would bring the hand there: the arm falls short of small steps


@dataclass(frozen=True)
class Style:
    """How an expert moves.

    speed: largest number of an action.
    sway: spread of slow wandering that is added to the motion, in the units of actions.
    detour: metres by which the hand comes from aside.
    regrasps: times that the gripper closes above the object, in vain, before it goes down.
    """

    speed: float = 1.0
    sway: float = 0.0
    detour: float = 0.0
    regrasps: int = 0


CLEAN = Style()
MIXED = (
    CLEAN,
    Style(speed=0.7),
    Style(speed=0.8, sway=0.1),
    Style(speed=0.6, sway=0.15, detour=0.05),
    Style(speed=0.6, sway=0.1, regrasps=1),
    Style(speed=0.45, sway=0.25, detour=0.08, regrasps=1),
)
"""From fast to clumsy."""


@dataclass(frozen=True)
class Scene:
    """What is seen: the first object's place and turn about the vertical, the hand's place and axes, and all of it."""

    object: Array
    turn: float
    hand: Array
    axes: Array
    row: Array

    @classmethod
    def of(cls, seen: Array, fields: int, arm: int = 0) -> Scene:
        """As `arm` has it, from an observation in which `fields` numbers are the objects'."""
        row = np.asarray(seen, dtype=np.float64)
        turn = Rotation.from_quat(row[3:7]).as_matrix()
        hand = row[fields + 9 * arm :]
        axes = Rotation.from_quat(hand[3:7]).as_matrix()
        return cls(row[:3], math.atan2(turn[1, 0], turn[0, 0]), hand[:3], axes, row)


Goal = Callable[[Scene], tuple[Array, float | Array]]
"""Where the hand shall be, and its turn about the vertical with the fingers down, or its axes."""


@dataclass(frozen=True)
class Motion:
    """One motion; `goal` says of the scene where the hand shall be and its turn.

    steps: how many it takes; None: until the hand is within `within` metres, or patience ends.
    until: where given, the motion is over only once this is seen.
    """

    goal: Goal
    grip: float
    within: float = 0.01
    steps: int | None = None
    careful: bool = False  # without sway, and no faster than half
    until: Callable[[Scene], bool] | None = None


def expert(task: Robosuite) -> Expert:
    """The expert for the episode that has begun; where demonstrations are mixed, the seed says in which style."""
    style = MIXED[task.seed % len(MIXED)] if task.spec.name.endswith("-mh") else CLEAN
    plan = {"robosuite-lift": _lift, "robosuite-can": _can, "robosuite-square": _square}[scene_of(task.spec.name)]
    fields = task.spec.obs_dim - 9
    random = np.random.default_rng((task.seed, 1))
    motions = plan(task, Scene.of(task.observe(), fields), style, random)
    driver = Driver(motions, style, random)
    return lambda seen: driver.action(Scene.of(seen, fields))


class Driver:
    """Goes through the motions and turns each into actions; the last is held."""

    def __init__(self, motions: Iterator[Motion], style: Style, random: np.random.Generator) -> None:
        self._motions, self._style, self._random = motions, style, random
        self._motion = next(motions)
        self._steps = 0
        self._sway = np.zeros(3)

    def action(self, scene: Scene) -> Array:
        place, turn = self._motion.goal(scene)
        if self._over(scene, place - scene.hand):
            self._motion, self._steps = next(self._motions, self._motion), 0
            place, turn = self._motion.goal(scene)
        self._steps += 1
        self._sway = 0.8 * self._sway + 0.6 * self._style.sway * self._random.standard_normal(3)
        careful = self._motion.careful
        speed = self._style.speed * (0.5 if careful else 1.0)
        shift = np.clip(_GAIN * (place - scene.hand) / _STEP, -speed, speed) + (0.0 if careful else 1.0) * self._sway
        wanted = turn if isinstance(turn, np.ndarray) else Rotation.from_euler("z", turn).as_matrix() @ DOWN
        spin = Rotation.from_matrix(wanted @ scene.axes.T).as_rotvec() / _TURN
        action = np.array([*shift, *np.clip(spin, -speed, speed), self._motion.grip])
        return action.clip(-1.0, 1.0)

    def _over(self, scene: Scene, left: Array) -> bool:
        if self._motion.until is not None:
            return self._motion.until(scene)
        if self._motion.steps is not None:
            return self._steps >= self._motion.steps
        return bool(np.linalg.norm(left) < self._motion.within) or self._steps >= _PATIENCE / self._style.speed


def _lift(task: Robosuite, first: Scene, style: Style, random: np.random.Generator) -> Iterator[Motion]:
    """Over the cube, down to it, close, up."""
    turn = nearest(first.turn, math.pi / 2)

    def at(height: float) -> Goal:
        return lambda scene: (scene.object + up(height), turn)

    yield from _approach(at(0.08), at(0.0), style, random)
    top = first.object + up(0.12)
    yield Motion(lambda scene: (top, turn), CLOSED)


def _can(task: Robosuite, first: Scene, style: Style, random: np.random.Generator) -> Iterator[Motion]:
    """Over the can, down to it, close, up, across the wall, down into its bin, open, up."""
    x, y, floor = task.env.target_bin_placements[task.env.object_id] - (
        0.045,
        0.05,
        0,
    )  # its near corner: arms are short

    def at(height: float) -> Goal:
        return lambda scene: (scene.object + up(height), 0.0)

    def carried(x: float, y: float, z: float) -> Goal:
        return lambda scene: (np.array([x, y, z]), 0.0)

    yield from _approach(at(0.12), at(0.01), style, random)
    high, low = floor + 0.2, floor + 0.1
    yield Motion(carried(first.object[0], first.object[1], high), CLOSED, within=0.03)
    yield Motion(carried(x, y, high), CLOSED, within=0.02)
    yield Motion(carried(x, y, low), CLOSED, within=0.02)
    yield Motion(carried(x, y, low), OPEN, steps=6)
    yield Motion(carried(x, y, high), OPEN)


def _square(task: Robosuite, first: Scene, style: Style, random: np.random.Generator) -> Iterator[Motion]:
    """Over the nut's handle, down, close, up, over the peg with the nut's sides along the peg's, down, open, up."""
    peg = np.array(task.env.sim.data.body_xpos[task.env.peg1_body_id])
    grasp = nearest(first.turn, math.pi)
    final = min(
        (quarter * math.pi / 2 for quarter in range(-1, 3)), key=lambda turn: turning_effort(turn, first.turn, grasp)
    )
    turn = grasp + nearest(final - first.turn, 2 * math.pi)  # of the hand, once the nut lies along the peg's sides

    def handle(height: float) -> Goal:
        return lambda scene: (scene.object + ahead(scene.turn, 0.06) + up(height), grasp)

    def nut_at(height: float) -> Goal:
        """The hand goes where the nut is at its place, and turns as it must, whatever the grasp was like."""

        def goal(scene: Scene) -> tuple[Array, float]:
            now = math.atan2(scene.axes[1, 0], scene.axes[0, 0])
            return scene.hand + peg + up(height) - scene.object, now + nearest(final - scene.turn, 2 * math.pi)

        return goal

    yield from _approach(handle(0.1), handle(0.0), style, random)
    yield Motion(lambda scene: (np.array([*scene.hand[:2], peg[2] + 0.15]), grasp), CLOSED, within=0.03)
    yield Motion(lambda scene: (peg + up(0.15) + scene.hand - scene.object, turn), CLOSED, within=0.03)
    yield Motion(nut_at(0.13), CLOSED, within=0.005, careful=True)
    yield Motion(nut_at(0.13), CLOSED, steps=4, careful=True)
    yield Motion(nut_at(0.0), CLOSED, within=0.02, careful=True)
    yield Motion(lambda scene: (scene.hand, turn), OPEN, steps=6)
    yield Motion(lambda scene: (scene.hand + up(0.05), turn), OPEN)


def within_reach(turn: float) -> bool:
    """Whether the hand can be turned so far about the vertical."""
    return _WRIST[0] < turn < _WRIST[1]


def turning_effort(final: float, first: float, grasp: float) -> float:
    """How far the nut is turned; more where its handle points away from the arm, which is at its reach there, and most where
    the wrist is at its end."""
    turned = nearest(final - first, 2 * math.pi)
    return abs(turned) + 2 * math.cos(final) + 10 * (not within_reach(grasp + turned))


def _approach(
    above: Goal,
    down: Goal,
    style: Style,
    random: np.random.Generator,
) -> Iterator[Motion]:
    """Open over the object, from aside if the style says so, down, and close."""
    if style.detour:
        angle = random.uniform(0, 2 * math.pi)
        aside = ahead(angle, style.detour)
        yield Motion(lambda scene: (above(scene)[0] + aside, above(scene)[1]), OPEN, within=0.03)
    yield Motion(above, OPEN, within=0.02)
    for _ in range(style.regrasps):
        yield Motion(above, CLOSED, steps=6)
        yield Motion(above, OPEN, steps=6)
    yield from grasp(above, down)


def grasp(above: Goal, down: Goal, closing: int = 8) -> Iterator[Motion]:
    """Open over the object, down, and close in so many steps."""
    yield Motion(above, OPEN, careful=True)
    yield Motion(down, OPEN, within=0.008, careful=True)
    yield Motion(down, CLOSED, steps=closing, careful=True)


def held(place: Array, turn: float | Array) -> Goal:
    """The same place and turn, whatever is seen."""
    return lambda scene: (place, turn)


def nearest(angle: float, symmetry: float) -> float:
    """The same turn of something that looks alike after `symmetry`, the nearest to none."""
    return angle - symmetry * round(angle / symmetry)


def ahead(angle: float, length: float) -> Array:
    return np.array([length * math.cos(angle), length * math.sin(angle), 0.0])


def up(height: float) -> Array:
    return np.array([0.0, 0.0, height])
