"""Run an exported policy in a control loop, as on a robot: numpy and onnxruntime are there, torch is not.

blockcache export pusht schedule.json -o policy.onnx
python examples/deploy_onnx.py policy.onnx
"""

import sys
import time

import numpy as np

from blockcache.deploy import History, open_export


class Robot:
    """Put yours here. This one sees a ramp, whatever it does."""

    def __init__(self, obs_dim: int) -> None:
        self.seen = np.zeros(obs_dim)

    def observe(self) -> np.ndarray:
        return self.seen

    def execute(self, action: np.ndarray) -> None:
        self.seen += 0.1


def main() -> None:
    policy = open_export(sys.argv[1] if len(sys.argv) > 1 else "policy.onnx")
    robot, history = Robot(policy.sizes["obs"][2]), History(policy.n_obs_steps)
    generator = np.random.default_rng(0)

    seen = history.push(robot.observe())  # (1, n_obs_steps, obs_dim)
    for chunk in range(5):
        started = time.perf_counter()
        actions = policy.predict_action(seen, generator=generator)["action"][0]  # (n_action_steps, action_dim)
        took = (time.perf_counter() - started) * 1e3
        print(f"chunk {chunk}: {len(actions)} actions in {took:.1f} ms, the first is {np.round(actions[0], 2)}")
        for action in actions:
            robot.execute(action)
            seen = history.push(robot.observe())


if __name__ == "__main__":
    main()
