"""Run an exported policy in a control loop, as on a robot: numpy and onnxruntime are there, torch is not.

The robot waits here while the policy thinks; `blockcache_runtime.Player` (docs/on-a-robot.md) computes while it moves.

blockcache export pusht schedule.json -o policy.onnx
python examples/deploy_onnx.py policy.onnx
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from blockcache_runtime import ExportedPolicy, History, open_export


class Robot:
    """Put yours here. This one sees a ramp, and frames that brighten, whatever it does."""

    def __init__(self, policy: ExportedPolicy) -> None:
        self.shapes = {name: shape if name in policy.timeless else shape[1:] for name, shape in policy.inputs.items()}
        self.cameras = policy.cameras
        self.moved = 0

    def observe(self) -> dict[str, np.ndarray]:
        return {
            name: np.full(shape, self.moved, np.uint8) if name in self.cameras else np.full(shape, 0.1 * self.moved)
            for name, shape in self.shapes.items()
        }

    def execute(self, action: np.ndarray) -> None:
        self.moved += 1


def main() -> None:
    policy = open_export(sys.argv[1] if len(sys.argv) > 1 else "policy.onnx")
    robot, history = Robot(policy), History(policy.n_obs_steps, policy.timeless)
    generator = np.random.default_rng(0)

    seen = history.push(robot.observe())  # by name, each (1, n_obs_steps, ...)
    with ThreadPoolExecutor(1) as aside:  # encoding a frame takes longer than a tick of the robot
        for chunk in range(5):
            started = time.perf_counter()
            actions = policy.predict_action(seen, generator=generator)["action"][0]  # (n_action_steps, action_dim)
            took = (time.perf_counter() - started) * 1e3
            print(f"chunk {chunk}: {len(actions)} actions in {took:.1f} ms, the first is {np.round(actions[0], 2)}")
            encoding = None
            for action in actions:
                robot.execute(action)
                seen = history.push(robot.observe())
                if encoding is None or encoding.done():  # a camera's new frame, ahead of the next chunk
                    encoding = aside.submit(policy.encode_frames, seen)


if __name__ == "__main__":
    main()
