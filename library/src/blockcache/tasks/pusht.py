"""Push-T: push a T-shaped block onto its goal with a round finger. gym-pusht, seen as Diffusion Policy sees it.

The observation is nine keypoints of the block and the position of the agent; an action is where the agent shall go,
in pixels. The score is the best clip(coverage / 0.95, 0, 1) of the episode, success a coverage of at least 0.95.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError
from blockcache.tasks.base import Array, TaskSpec

_ENOUGH = 0.95  # the coverage that counts as success

# The keypoints of the public demonstrations in the block's own frame, fitted to them (in the median to 3e-4 px).
_KEYPOINTS = np.array(
    [
        [9.269523, 90.04107],
        [-60.9833, -1.1869643],
        [60.912926, -1.3930173],
        [-0.27045965, 25.54368],
        [-14.065348, 122.81584],
        [39.002747, 32.857647],
        [-39.966404, 32.72952],
        [-16.824478, 62.863155],
        [23.541634, -1.7001194],
    ]
)


class PushT:
    """One Push-T simulator. The seed draws the start as gym-pusht does; the physics has no randomness."""

    def __init__(self, spec: TaskSpec) -> None:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen otherwise
        from gym_pusht.envs.pusht import PushTEnv

        self.spec = spec
        self._env: Any = PushTEnv(obs_type="state", render_mode="rgb_array")
        self._env._get_coverage = partial(_coverage, self._env)
        self._steps = 0
        self._best = -1.0  # best coverage so far; below 0 before the first reset

    def reset(self, seed: int) -> Array:
        self._env.reset(seed=int(seed))
        return self._begin()

    def set_state(self, state: Array) -> Array:
        """Start an episode at (agent x, y, block x, y, angle), such as a step of a recorded demonstration."""
        values = np.asarray(state, dtype=np.float64)
        if values.shape != (5,) or not np.isfinite(values).all():
            raise TaskError(f"a Push-T state is 5 finite numbers, got {state!r}")
        self._env.reset(seed=0)  # a fresh space: velocities and contacts of an earlier episode must not stay
        agent, block = self._env.agent, self._env.block
        agent.position = tuple(values[:2].tolist())
        # The angle turns the block about its centre of mass, which moves its origin. So it comes first; gym-pusht's own
        # "reset_to_state" has it last and ends up somewhere else.
        block.angle = float(values[4])
        block.position = tuple(values[2:4].tolist())
        self._env.space.step(self._env.dt)  # as after any reset: contacts that exist at the start take effect
        return self._begin()

    def move_goal(self, right: float, down: float) -> None:
        """Move the goal of this episode by so many pixels; the next one has it where it always was."""
        self._env.goal_pose = self._env.goal_pose + np.array([right, down, 0.0])

    @property
    def state(self) -> npt.NDArray[np.float64]:
        """(agent x, y, block x, y, angle in [0, 2 pi))."""
        return np.asarray(self._env.get_obs(), dtype=np.float64)

    def observe(self) -> Array:
        return observation(self.state)

    def step(self, action: Array) -> None:
        if self._best < 0:
            raise TaskError("the Push-T episode has not begun; call reset first")
        target = np.asarray(action, dtype=np.float64)
        if target.shape != (self.spec.action_dim,) or not np.isfinite(target).all():
            raise TaskError(f"a Push-T action is {self.spec.action_dim} finite numbers, got {action!r}")
        *_, info = self._env.step(target)
        self._steps += 1
        self._best = max(self._best, float(info["coverage"]))

    @property
    def score(self) -> float:
        return float(np.clip(self._best / _ENOUGH, 0.0, 1.0))

    @property
    def success(self) -> bool:
        return self._best >= _ENOUGH

    @property
    def done(self) -> bool:
        return self.success or self._steps >= self.spec.max_steps

    def render(self) -> npt.NDArray[np.uint8]:
        return np.asarray(self._env.render(), dtype=np.uint8)

    def close(self) -> None:
        self._env.close()

    def _begin(self) -> Array:
        self._steps, self._best = 0, 0.0  # a score is earned by actions: the start does not count
        return self.observe()


def _coverage(env: Any) -> float:
    """The share of the goal that the block covers, as gym-pusht's own method gives it but for the last digits: pymunk gives
    the block's shapes as a set, whose order differs from process to process, and here it is always the same."""
    from gym_pusht.envs.pusht import pymunk_to_shapely

    shapes = sorted(env.block.shapes, key=lambda shape: shape.get_vertices())
    goal = pymunk_to_shapely(env.get_goal_pose_body(env.goal_pose), shapes)
    return float(goal.intersection(pymunk_to_shapely(env.block, shapes)).area / goal.area)


def observation(state: Array) -> npt.NDArray[np.float32]:
    """The 20 numbers that a policy sees in a state: nine keypoints of the block (x, y), then the agent.

    Args:
        state: (5,) agent x, y in pixels, block x, y in pixels, and its angle in radians.
    """
    x, y, angle = state[2:5]
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    keypoints = _KEYPOINTS @ turn.T + (x, y)  # (9, 2)
    return np.concatenate((keypoints.ravel(), state[:2])).astype(np.float32)
