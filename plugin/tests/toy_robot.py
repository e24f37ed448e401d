"""The toy environment as a robot of LeRobot's, for `lerobot-rollout`: five joints, four of which are told where to go."""

from dataclasses import dataclass

import numpy as np
from lerobot.robots import Robot, RobotConfig
from lerobot_parts import ACTION, CAMERAS, FRAME, STATE, Reach

JOINTS = [f"joint{place}.pos" for place in range(STATE)]


@RobotConfig.register_subclass("toy")
@dataclass
class ToyRobotConfig(RobotConfig):
    """Has no settings of its own."""


class ToyRobot(Robot):
    config_class, name = ToyRobotConfig, "toy"
    is_connected = is_calibrated = True

    def __init__(self, config):
        super().__init__(config)
        self.place, self.told = Reach(), []

    @property
    def observation_features(self):
        cameras = {name.rpartition(".")[2]: (FRAME, FRAME, 3) for name in CAMERAS}
        return dict.fromkeys(JOINTS, float) | cameras

    @property
    def action_features(self):
        return dict.fromkeys(JOINTS[:ACTION], float)

    def connect(self, calibrate=True):
        self.place.reset(seed=0)

    def calibrate(self):
        """Nothing to do."""

    def configure(self):
        """Nothing to do."""

    def get_observation(self):
        seen = self.place.observe()
        return {**dict(zip(JOINTS, map(float, seen["agent_pos"]), strict=True)), **seen["pixels"]}

    def send_action(self, action):
        self.told.append([action[name] for name in JOINTS[:ACTION]])
        self.place.step(np.array(self.told[-1]))
        return action

    def disconnect(self):
        np.save("actions.npy", np.array(self.told))
