"""Lift, Can and Square of robosuite with a Panda arm: low-dimensional observations in Robomimic's order, seven actions.

An observation is the object (its pose, and where it is seen from the hand), the hand's position and quaternion, and both
fingers. An action moves the hand (three numbers, 1 is 5 cm), turns it (three, 1 is half a radian) and closes the gripper.
The seed draws where the arm and the object begin; the score of an episode is its success.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError
from blockcache.tasks.base import Array, TaskSpec
from blockcache_lab.tasks.flagged import Flagged
from blockcache_lab.tasks.mujoco_scenes import borrow, check_mujoco, choose_graphics, give_back, quiet

# Our name -> robosuite's, and the parts of "object" in Robomimic's order.
SCENES = {
    "robosuite-lift": ("Lift", ("cube_pos", "cube_quat", "gripper_to_cube_pos")),
    "robosuite-can": ("PickPlaceCan", ("Can_pos", "Can_quat", "Can_to_robot0_eef_pos", "Can_to_robot0_eef_quat")),
    "robosuite-square": (
        "NutAssemblySquare",
        ("SquareNut_pos", "SquareNut_quat", "SquareNut_to_robot0_eef_pos", "SquareNut_to_robot0_eef_quat"),
    ),
}
HAND = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
STYLES = ("-ph", "-mh")  # behind a scene's name: who showed it, one clean expert or six of them
_RATE = 20  # actions a second


class Robosuite(Flagged):
    """One robosuite simulator."""

    simulator = "robosuite"

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(spec)
        choose_graphics()
        check_mujoco("robosuite 1.5", spec.extra)
        self._name, self._parts = SCENES[scene_of(spec.name)]
        self.env: Any = borrow(self._name, lambda: _built(self._name))
        self.seed = 0
        self._seen = np.zeros(spec.obs_dim, dtype=np.float32)

    def reset(self, seed: int) -> Array:
        self.seed = int(seed)
        self.env.rng.bit_generator.state = np.random.default_rng(self.seed).bit_generator.state  # shared by its parts
        with quiet():
            self.env.reset()
        self._begin()
        self.env._get_observations(force_update=True)  # what is seen from the hand lags by one look
        self._look()
        return self._seen

    def observe(self) -> Array:
        return self._seen

    def step(self, action: Array) -> None:
        self.env.step(np.clip(self._checked(action), -1.0, 1.0))
        self._stepped(self.env._check_success())
        self._look()

    def render(self) -> npt.NDArray[np.uint8]:
        raise TaskError(
            "robosuite scenes are built without a renderer here, so that no graphics are needed: there is no picture; "
            "Push-T, Block Pushing and Meta-World can be filmed"
        )

    def close(self) -> None:
        if self.env is not None:
            give_back(self._name, self.env)
            self.env = None

    def _look(self) -> None:
        seen = self.env._get_observations(force_update=True)
        self._seen = np.concatenate([seen[name] for name in (*self._parts, *HAND)]).astype(np.float32)


def _built(name: str) -> Any:
    """A simulator of robosuite's task of that name."""
    with quiet():
        import robosuite
        from robosuite.controllers import load_composite_controller_config

        control = load_composite_controller_config(controller="BASIC", robot="Panda")
        control["body_parts"] = {"right": control["body_parts"]["right"]}  # of the arms it could have
        return robosuite.make(
            name,
            robots="Panda",
            controller_configs=control,
            control_freq=_RATE,
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            ignore_done=True,
            hard_reset=False,
            seed=0,
        )


def scene_of(task: str) -> str:
    """The scene's name in a task's, which also says who demonstrates it."""
    return task[:-3] if task.endswith(STYLES) else task
