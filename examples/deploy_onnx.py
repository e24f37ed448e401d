"""Run an exported policy with nothing but numpy and onnxruntime: this is all that a robot needs.

blockcache export pusht schedule.json -o policy.onnx
python examples/deploy_onnx.py policy.onnx
"""

import sys
import time

import numpy as np
import onnxruntime


def open_policy(path: str, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_reuse = False  # planning the reuse of thousands of small buffers makes loading slow
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    session = open_policy(sys.argv[1] if len(sys.argv) > 1 else "policy.onnx")
    shapes = {item.name: item.shape for item in session.get_inputs()}
    _, n_obs_steps, obs_dim = shapes["obs"]
    draws, _, horizon, action_dim = shapes["noise"]
    rng = np.random.default_rng(0)

    history = np.zeros((1, n_obs_steps, obs_dim), dtype=np.float32)  # put the robot's last observations here
    for chunk in range(5):
        started = time.perf_counter()
        noise = rng.standard_normal((draws, 1, horizon, action_dim), dtype=np.float32)
        action = session.run(["action"], {"obs": history, "noise": noise})[0][0]  # (n_action_steps, action_dim)
        took = (time.perf_counter() - started) * 1e3
        print(f"chunk {chunk}: {len(action)} actions in {took:.1f} ms, the first is {np.round(action[0], 2)}")


if __name__ == "__main__":
    main()
