"""Block Pushing: a rod pushes two blocks, each into a zone of its own; which block goes where, and which first, is free.

An observation is x, y and angle of block 1 and of block 2, x and y of the rod and of its target, and x, y and angle of
zone 1 and of zone 2; an action moves the rod's target, in metres. A seed gives the very scene that it gives in the public
task. Score 0.49 (p1): a block has entered a zone; score 1 (p2, success): both lie in different zones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError
from blockcache.tasks.base import Array, Expert, TaskSpec
from blockcache_lab.tasks.block_pushing_scene import Scene

WITHIN = 0.05  # metres between the middles of a block and of its zone
ONE_IN = 0.49  # the score once a block has entered a zone, as the public reward counts it
_CENTRE_X, _BLOCKS_Y, _ZONES_Y = 0.4, -0.2, 0.2
_BLOCKS_APART = 0.1  # metres along x, at least
_ATTEMPTS = 1000  # to place the second block far enough from the first
_RATE = 10.0  # actions a second


class BlockPushing:
    """One Block Pushing simulator."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        import pybullet  # noqa: F401  # a missing one is told at once

        self._scene: Scene | None = None  # None before the first reset, and behind the end
        self._zones: Array = np.zeros((2, 3))
        self._steps = 0
        self._score = 0.0
        self._seen: Array = np.zeros(spec.obs_dim)
        self.random = np.random.RandomState(0)
        """What the expert draws from too, after the scene was drawn."""

    def reset(self, seed: int) -> Array:
        self.random = np.random.RandomState(int(seed))  # numpy's old generator: the public task's
        blocks = _two_blocks(self.random)
        self._zones = _two_zones(self.random)
        self.close()
        self._scene = Scene(list(blocks), list(self._zones))
        self._steps, self._score = 0, 0.0
        self._seen = self._look(self._scene)
        return self.observe()

    def observe(self) -> Array:
        return self._seen.astype(np.float32)

    def step(self, action: Array) -> None:
        if self._scene is None:
            raise TaskError("the Block Pushing episode has not begun; call reset first")
        wanted = np.asarray(action, dtype=np.float64)
        if wanted.shape != (2,) or not np.isfinite(wanted).all():
            raise TaskError(f"a Block Pushing action is 2 finite numbers, got {action!r}")
        self._scene.move(wanted.astype(np.float32).astype(np.float64))  # as demonstrations keep it: a replay is exact
        self._steps += 1
        self._seen = self._look(self._scene)
        inside = _distances(self._seen) < WITHIN
        both = bool((inside[0, 0] and inside[1, 1]) or (inside[0, 1] and inside[1, 0]))
        self._score = max(self._score, 1.0 if both else ONE_IN if inside.any() else 0.0)

    @property
    def score(self) -> float:
        return self._score

    @property
    def success(self) -> bool:
        return self._score == 1.0

    @property
    def done(self) -> bool:
        return self.success or self._steps >= self.spec.max_steps

    @property
    def state(self) -> Array:
        """What is observed, in double precision."""
        return self._seen

    def render(self) -> npt.NDArray[np.uint8]:
        if self._scene is None:
            raise TaskError("there is nothing to draw before the Block Pushing episode has begun; call reset first")
        return self._scene.render(384)

    def close(self) -> None:
        if self._scene is not None:
            self._scene.close()
            self._scene = None

    def _look(self, scene: Scene) -> Array:
        return np.concatenate([scene.observe(), *(_half_turn(zone) for zone in self._zones)])


def expert(task: BlockPushing) -> Expert:
    """The scripted pusher, for the episode that has begun. It draws which block goes first and where, so that its episodes
    show all four ways."""
    block, zone = divmod(int(task.random.choice(4)), 2)
    motions = _pushing(task, ((block, zone), (1 - block, 1 - zone)))
    return lambda observation: next(motions)


def _pushing(task: BlockPushing, pairs: tuple[tuple[int, int], tuple[int, int]]) -> Iterator[Array]:
    """The expert's actions. Once the first block lies in its zone the rod goes back the way it came, so that it sweeps no
    block away."""
    pusher = _Pusher(task.state[8:10].copy())
    for order, (block, zone) in enumerate(pairs):
        while True:
            seen = task.state
            place, goal = seen[3 * block : 3 * block + 2], seen[10 + 3 * zone : 12 + 3 * zone]
            if order == 0 and np.linalg.norm(place - goal) < WITHIN - 0.01:
                pusher.retreat()
                break
            yield pusher.action(place, float(seen[3 * block + 2]), goal, seen[8:10])


class _Pusher:
    """A state machine: go behind the block, up to it, push; where its side is askew, turn it first.

    Phases: behind, near, push, left, right (turning the block); back and home (after the first block).
    """

    def __init__(self, home: Array) -> None:
        self._home = home
        self._phase = "behind"
        self._first_behind: Array | None = None

    def retreat(self) -> None:
        self._phase = "back"

    def action(self, block: Array, angle: float, goal: Array, rod: Array) -> Array:
        """Where the rod shall move next, given where things are."""
        way = (goal - block) / np.linalg.norm(goal - block)
        askew = _quarter(math.atan2(way[1], way[0]) - angle)
        behind = block - way * 0.05
        speed, aim = 0.35, rod  # metres a second
        if self._phase == "behind":
            speed, aim = 0.3, behind
            if _close(aim, rod):
                self._phase = "near"
                self._first_behind = behind.copy() if self._first_behind is None else self._first_behind
        if self._phase == "back":
            speed, aim = 0.3, self._home if self._first_behind is None else self._first_behind
            if _close(aim, rod):
                self._phase = "home"
        if self._phase == "home":
            speed, aim = 0.3, self._home
            if _close(aim, rod):
                self._phase = "behind"
        if self._phase == "near":
            aim = block - way * 0.03
            if _close(aim, rod):
                self._phase = "push"
            if abs(askew) > 0.2:
                self._phase = "left" if askew > 0 else "right"
        if self._phase == "push":
            aim = block - way * 0.01
            if abs(askew) > 0.2:
                self._phase = "behind"
        if self._phase in ("left", "right"):
            turn = 0.2 if self._phase == "left" else -0.2
            speed, aim = 0.15, block + 0.025 * _turned(_unit(rod - block), turn)
            if askew * turn < 0.03 * abs(turn):
                self._phase = "behind"
        return _limited(aim - rod, speed / _RATE)


def _two_blocks(random: np.random.RandomState) -> Array:
    """x, y and angle of both. Where the first leaves hardly any room for the second, it is drawn again after a while."""

    def draw() -> tuple[float, float]:
        return _place(random, _CENTRE_X, 0.1, _BLOCKS_Y, 0.15)

    while True:
        first = (*draw(), random.uniform(math.pi))
        tries = (draw() for _ in range(_ATTEMPTS))
        second = next((place for place in tries if abs(place[0] - first[0]) > _BLOCKS_APART), None)
        angle = random.uniform(math.pi)
        if second is not None:
            return np.array([first, (*second, angle)])


def _two_zones(random: np.random.RandomState) -> Array:
    """x, y and angle of both, on either side, which keeps them apart; which is left is drawn."""
    side = 0.12 * random.choice([-1, 1])
    zones = [(*_place(random, _CENTRE_X + x, 0.005, _ZONES_Y, 0.0075), _zone_angle(random)) for x in (side, -side)]
    return np.array(zones)


def _place(random: np.random.RandomState, x: float, dx: float, y: float, dy: float) -> tuple[float, float]:
    return x + random.uniform(-dx, dx), y + random.uniform(-dy, dy)


def _zone_angle(random: np.random.RandomState) -> float:
    return math.pi + random.uniform(-math.pi / 30, math.pi / 30)


def _half_turn(pose: Array) -> Array:
    return np.array([pose[0], pose[1], pose[2] % math.pi])


def _distances(seen: Array) -> Array:
    """(2, 2): between each block and each zone."""
    blocks, zones = seen[[[0, 1], [3, 4]]], seen[[[10, 11], [13, 14]]]
    apart: Array = np.linalg.norm(blocks[:, None] - zones[None], axis=-1)
    return apart


def _quarter(angle: float) -> float:
    """The same for a square, within an eighth of a turn."""
    while angle > math.pi / 4:
        angle -= math.pi / 2
    while angle < -math.pi / 4:
        angle += math.pi / 2
    return angle


def _unit(vector: Array) -> Array:
    return vector / np.linalg.norm(vector)


def _turned(vector: Array, angle: float) -> Array:
    cos, sin = math.cos(angle), math.sin(angle)
    return np.array([cos * vector[0] - sin * vector[1], sin * vector[0] + cos * vector[1]])


def _close(place: Array, other: Array) -> bool:
    return bool(np.linalg.norm(place - other) < 0.001)


def _limited(shift: Array, most: float) -> Array:
    length = np.linalg.norm(shift)
    return shift * (most / length) if length > most else shift
