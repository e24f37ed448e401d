"""Meta-World manipulation with a Sawyer arm: 39 numbers in (the goal among them), hand motion and grip out.

The seed draws where objects and goal are; the physics has no randomness. The score of an episode is its success.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.tasks.base import Array, Expert, TaskSpec
from blockcache_lab.tasks.flagged import Flagged
from blockcache_lab.tasks.mujoco_scenes import choose_graphics, drawn

PREFIX = "metaworld-"  # of the names of these tasks; what follows is Meta-World's own name
_LIMIT = 1.0  # of every action, either way


class MetaWorld(Flagged):
    """One Meta-World simulator."""

    simulator = "Meta-World"

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(spec)
        choose_graphics()
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        # The plain class, not its "goal observable" form, which draws from numpy's global generator.
        self._env: Any = ALL_V3_ENVIRONMENTS[f"{spec.name.removeprefix(PREFIX)}-v3"](
            render_mode="rgb_array", camera_name="corner2", width=384, height=384
        )
        self._env._partially_observable = False
        self._env._set_task_called = True
        self._env._freeze_rand_vec = False
        self._env.seeded_rand_vec = True
        del self._env.sawyer_observation_space  # cached while the goal was hidden, it would clip the goal to zero
        self._seen = np.zeros(spec.obs_dim, dtype=np.float32)

    def reset(self, seed: int) -> Array:
        self._env.seed(int(seed))
        observed, _ = self._env.reset()
        self._begin()
        self._seen = np.asarray(observed, dtype=np.float32)
        return self._seen

    def observe(self) -> Array:
        return self._seen

    def step(self, action: Array) -> None:
        observed, *_, info = self._env.step(np.clip(self._checked(action), -_LIMIT, _LIMIT))
        self._stepped(info["success"])
        self._seen = np.asarray(observed, dtype=np.float32)

    def render(self) -> npt.NDArray[np.uint8]:
        return drawn(self._env.render)[::-1]  # this camera hangs upside down

    def close(self) -> None:
        self._env.close()


def expert(task: MetaWorld) -> Expert:
    """Meta-World's scripted policy for the task."""
    from metaworld.policies import ENV_POLICY_MAP

    policy = ENV_POLICY_MAP[f"{task.spec.name.removeprefix(PREFIX)}-v3"]()

    def act(observation: Array) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what it asks for beyond the limits, which are kept below
            wanted = policy.get_action(np.asarray(observation, dtype=np.float64))
        return np.clip(np.asarray(wanted, dtype=np.float64), -_LIMIT, _LIMIT)

    return act
