"""Push-T through a camera: what `pusht` shows as numbers, as a frame of 96 x 96 pixels and the position of the agent.

Frames are drawn by gym-pusht as those of the public demonstrations were. Physics, score and success are those of `pusht`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from blockcache.tasks.base import Array, TaskSpec, Tree
from blockcache.tasks.pusht import PushT, observation


class PushTImage(PushT):
    """One Push-T simulator that is looked at."""

    def observe(self) -> Tree:
        return {"image": self.frame(), "agent_pos": self.state[:2].astype(np.float32)}

    def frame(self) -> npt.NDArray[np.uint8]:
        """The scene as it is now, (3, 96, 96): gym-pusht's own pixels, without two copies of its screen that take longer
        than the drawing."""
        import cv2

        screen = self._env._draw()
        drawn = np.frombuffer(screen.get_view("0"), np.uint8).reshape(
            *screen.get_size(), 4
        )  # blue, green, red, nothing
        return np.ascontiguousarray(np.moveaxis(cv2.resize(drawn, (96, 96)), -1, 0)[2::-1])

    ranges: ClassVar = {"agent_pos": ((0.0, 0.0), (512.0, 512.0))}
    """Smallest and largest of each input of numbers."""

    def random_states(self, rng: np.random.Generator, count: int) -> Array:
        """States to draw, (count, 5): half with everything anywhere, half with the block near its goal and the agent
        near the block, as it is most of the time."""
        anywhere = rng.uniform((15, 15, 60, 60, -np.pi), (497, 497, 452, 452, np.pi), size=(count, 5))
        near = np.concatenate((np.zeros((count, 2)), np.tile(self._env.goal_pose, (count, 1))), axis=1)
        near += rng.normal(0, (70, 70, 50, 50, 0.6), size=(count, 5))
        near[:, :2] = np.clip(near[:, :2] + near[:, 2:4], 15, 497)
        return np.where(rng.random((count, 1)) < 0.5, anywhere, near)

    def show(self, state: Array) -> tuple[Tree, Array]:
        """What is seen in a state, and the same as `pusht` shows it."""
        return {"image": self.frame_of(state), "agent_pos": state[:2].astype(np.float32)}, observation(state)

    def frame_of(self, state: Array) -> npt.NDArray[np.uint8]:
        """The scene in a state (agent x, y, block x, y, angle), such as a step of a demonstration; nothing moves."""
        env: Any = self._env
        env.agent.position = tuple(map(float, state[:2]))
        env.block.angle = float(state[4])  # before the position: it turns the block about its centre of mass
        env.block.position = tuple(map(float, state[2:4]))
        for body in (env.agent, env.block):
            env.space.reindex_shapes_for_body(body)
        return self.frame()


def frames_of(states: Array, spec: TaskSpec) -> npt.NDArray[np.uint8]:
    """A frame for each state of recorded demonstrations, (N, 5) -> (N, 3, 96, 96).

    Args:
        states: Agent x and y, block x and y in pixels, and the block's angle in radians.
        spec: Of the task whose scene is drawn.
    """
    task = PushTImage(spec)
    try:
        task.reset(0)
        return np.stack([task.frame_of(state) for state in states])
    finally:
        task.close()
