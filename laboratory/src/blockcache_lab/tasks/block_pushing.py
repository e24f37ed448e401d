"""Block Pushing: a rod pushes two blocks, each into a zone of its own; which block goes where, and which first, is free.

An observation is x, y and angle of block 1 and of block 2, x and y of the rod and of its target, and x, y and angle of
zone 1 and of zone 2; an action moves the rod's target, in metres. A seed gives the very scene that it gives in the public
task. Score 0.49 (p1): a block has entered a zone; score 1 (p2, success): both lie in different zones.
"""

from __future__ import annotations

import math

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
_PUSHED = 0.035  # metres from the middle of its zone where the expert leaves a block
_FAST, _PUSH = 0.03, 0.02  # metres a step: alone, and with a block
_BEHIND = 0.05  # metres: where the rod comes from, seen from the block's middle
_STRAIGHT = 0.018  # metres aside of the line at which a block is still pushed


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
    pairs = ((block, zone), (1 - block, 1 - zone))
    return lambda observation: _push_next(observation.astype(np.float64), pairs)


def _push_next(seen: Array, pairs: tuple[tuple[int, int], tuple[int, int]]) -> Array:
    """The expert's action. But for the pairs it depends on what is seen alone: a step that went wrong is seen, and so is the
    way back, whatever was meant before."""
    for block, zone in pairs:
        place, goal = seen[3 * block : 3 * block + 2], seen[10 + 3 * zone : 12 + 3 * zone]
        if np.linalg.norm(place - goal) > _PUSHED:
            return _push(place, goal, seen[8:10])
    return np.zeros(2)


def _push(block: Array, goal: Array, rod: Array) -> Array:
    """Where the rod shall move next: around the block, onto the line behind it, then along that line.

    Lengths are metres from the middle of the block, a square of 0.04; the rod touches it from 0.025 on.
    """
    way = (goal - block) / np.linalg.norm(goal - block)
    aside = np.array([-way[1], way[0]])
    along, across = float((rod - block) @ way), float((rod - block) @ aside)
    off = abs(across)
    if along < -0.015 and off < _STRAIGHT + 0.25 * max(0.0, -along - 0.03):
        if along < -0.04:  # up to the block
            return way * min(1.3 * _PUSH, -along - 0.022) - aside * np.clip(0.8 * across, -0.015, 0.015)
        return way * _PUSH * (1 - 0.5 * min(1.0, off / 0.03)) - aside * np.clip(0.6 * across, -0.008, 0.008)
    if along < -0.035:
        return _limited(block - way * _BEHIND - rod, _FAST)
    out = aside * math.copysign(1.0, across)
    if off < 0.045:
        return out * min(_FAST, 0.054 - off) - way * (0.3 * _FAST * (off > 0.03))
    return -way * min(_FAST, along + _BEHIND + 0.005) - out * np.clip(off - 0.06, -0.01, 0.01)


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


def _limited(shift: Array, most: float) -> Array:
    length = np.linalg.norm(shift)
    return shift * (most / length) if length > most else shift
