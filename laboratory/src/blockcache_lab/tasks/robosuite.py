"""Lift, Can, Square, ToolHang and Transport of robosuite with Panda arms: low-dimensional observations in Robomimic's order.

An observation is the objects (their poses, and where they are seen from the hand), then of each arm the hand's position
and quaternion, and both fingers. An action has seven numbers for each arm, along the world's axes: they move the hand
(three, 1 is 5 cm), turn it (three, 1 is half a radian) and close the gripper. The seed draws where arms and objects begin;
the score of an episode is its success.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError
from blockcache.tasks.base import Array, TaskSpec
from blockcache_lab.tasks.flagged import Flagged
from blockcache_lab.tasks.mujoco_scenes import borrow, check_mujoco, choose_graphics, give_back, quiet

_SEEN_FROM_THE_HAND = ("pos", "quat", "to_robot0_eef_pos", "to_robot0_eef_quat")

# Our name -> robosuite's, and the parts of "object" in Robomimic's order.
SCENES = {
    "robosuite-lift": ("Lift", ("cube_pos", "cube_quat", "gripper_to_cube_pos")),
    "robosuite-can": ("PickPlaceCan", ("Can_pos", "Can_quat", "Can_to_robot0_eef_pos", "Can_to_robot0_eef_quat")),
    "robosuite-square": (
        "NutAssemblySquare",
        ("SquareNut_pos", "SquareNut_quat", "SquareNut_to_robot0_eef_pos", "SquareNut_to_robot0_eef_quat"),
    ),
    "robosuite-tool-hang": (
        "ToolHang",
        (
            *(f"{thing}_{part}" for thing in ("base", "frame", "tool") for part in _SEEN_FROM_THE_HAND),
            *("frame_is_assembled", "tool_on_frame"),
        ),
    ),
    "robosuite-transport": (
        "TwoArmTransport",
        (
            *(f"{thing}_{part}" for thing in ("payload", "trash", "lid_handle") for part in ("pos", "quat")),
            *("target_bin_pos", "trash_bin_pos", "payload_in_target_bin", "trash_in_trash_bin"),
            *("gripper0_to_payload", "gripper0_to_lid_handle", "gripper1_to_payload", "gripper1_to_trash"),
        ),
    ),
}
_TWO_SIGNS = ("SquareNut_to_robot0_eef_quat",)
"""A quaternion and its negative are one rotation, and of these robosuite's sign changes at every touch, as w is about 0
where the hand points down. Here x + y is never negative: it changes only where hand and nut are a quarter turn apart."""
ARM = 7  # actions of one
STYLES = ("-ph", "-mh")  # behind a scene's name: who showed it, one clean expert or six of them
_RATE = 20  # actions a second


class Robosuite(Flagged):
    """One robosuite simulator."""

    simulator = "robosuite"

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(spec)
        choose_graphics()
        check_mujoco("robosuite 1.5", spec.extra)
        self._name, objects = SCENES[scene_of(spec.name)]
        arms = spec.action_dim // ARM
        self._parts = [
            *objects,
            *(f"robot{arm}_{part}" for arm in range(arms) for part in ("eef_pos", "eef_quat", "gripper_qpos")),
        ]
        self.env: Any = borrow(self._name, lambda: _built(self._name, arms))
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
        for name in _TWO_SIGNS:
            if name in seen and seen[name][0] + seen[name][1] < 0:
                seen[name] = -seen[name]
        self._seen = np.concatenate([np.ravel(seen[name]) for name in self._parts]).astype(np.float32)


def _built(name: str, arms: int) -> Any:
    """A simulator of robosuite's task of that name."""
    with quiet():
        import robosuite
        from robosuite.controllers import load_composite_controller_config

        control = load_composite_controller_config(controller="BASIC", robot="Panda")
        control["body_parts"] = {"right": control["body_parts"]["right"]}  # of the arms it could have
        if arms > 1:
            control["body_parts"]["right"]["input_ref_frame"] = "world"  # as Robomimic's; one arm alone looks along x
        return robosuite.make(
            name,
            robots=["Panda"] * arms,
            controller_configs=[control] * arms,
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
