"""Kitchen: a Franka arm in front of seven things, four of which are to be done, whichever and in any order.

An observation is where the nine joints are, fingers among them, and everything in the kitchen that moves (21 numbers). The
public task adds 30 numbers of a goal that never changes, which are left out. An action is the speed of each joint: 1 is two
radians a second. The seed draws the sensors' noise; the arm always begins at the same place. A quarter of the score for each
thing that is done: of many episodes, the share that scores at least k quarters is the paper's p_k.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.tasks.base import Array, TaskSpec
from blockcache_lab.tasks.flagged import Flagged
from blockcache_lab.tasks.mujoco_scenes import borrow, check_mujoco, choose_graphics, drawn, give_back, quiet

WANTED = 4  # of the seven
_SEEN = np.r_[0:9, 18:39]  # of what the simulator shows: positions, without speeds


class Kitchen(Flagged):
    """One kitchen of gymnasium-robotics."""

    simulator = "Kitchen"

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(spec)
        choose_graphics()
        check_mujoco("gymnasium-robotics 1.4", spec.extra)
        self.env: Any = borrow(self.simulator, _built)
        self.seed = 0
        self.finished: list[str] = []  # in the order in which they were
        self._seen = np.zeros(spec.obs_dim, dtype=np.float32)

    def reset(self, seed: int) -> Array:
        self.seed = int(seed)
        seen, _ = self.env.reset(seed=self.seed)
        self._begin()
        self.finished = []
        self._look(seen)
        return self._seen

    def observe(self) -> Array:
        return self._seen

    def step(self, action: Array) -> None:
        seen, *_, info = self.env.step(np.clip(self._checked(action), -1.0, 1.0))
        self.finished = list(info["episode_task_completions"])
        self._stepped(len(self.finished) >= WANTED)
        self._look(seen)

    @property
    def score(self) -> float:
        return min(len(self.finished), WANTED) / WANTED

    def render(self) -> npt.NDArray[np.uint8]:
        return drawn(self.env.render)

    def close(self) -> None:
        if self.env is not None:
            give_back(self.simulator, self.env)
            self.env = None

    def _look(self, seen: dict[str, Any]) -> None:
        self._seen = seen["observation"][_SEEN].astype(np.float32)


def _built() -> Any:
    with quiet():
        from gymnasium_robotics.envs.franka_kitchen.kitchen_env import OBS_ELEMENT_GOALS, KitchenEnv

        return KitchenEnv(list(OBS_ELEMENT_GOALS), render_mode="rgb_array", width=480, height=480)
