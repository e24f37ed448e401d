"""Push-T through a camera: what `pusht` shows as numbers, as a frame of 96 x 96 pixels and the position of the agent.

Frames are drawn by gym-pusht as those of the public demonstrations were. Physics, score and success are those of `pusht`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.tasks.base import Array, TaskSpec, Tree
from blockcache.tasks.pusht import PushT


class PushTImage(PushT):
    """One Push-T simulator that is looked at."""

    def observe(self) -> Tree:
        return {"image": self.frame(), "agent_pos": self.state[:2].astype(np.float32)}

    def frame(self) -> npt.NDArray[np.uint8]:
        """The scene as it is now, (3, 96, 96)."""
        env: Any = self._env
        env.obs_type = "pixels"
        try:
            pixels = env.get_obs()
        finally:
            env.obs_type = "state"
        return np.ascontiguousarray(np.moveaxis(np.asarray(pixels, dtype=np.uint8), -1, 0))

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
    """A frame for each state of recorded demonstrations, (N, 5) -> (N, 3, 96, 96)."""
    task = PushTImage(spec)
    try:
        task.reset(0)
        return np.stack([task.frame_of(state) for state in states])
    finally:
        task.close()
