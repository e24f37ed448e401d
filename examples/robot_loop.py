"""A control loop that never waits, on `blockcache_runtime.Player`, and how long its calls take.

python examples/robot_loop.py policy.onnx --rate 50 --minutes 10 --busy
"""

import argparse
import multiprocessing
import time

import numpy as np

from blockcache_runtime import Player, open_export


class Robot:
    """Put yours here. This one sees a ramp, and frames that brighten, whatever it does."""

    def __init__(self, policy):
        self.shapes, self.cameras, self.moved = policy.inputs, policy.cameras, 0

    def observe(self):
        return {
            name: np.full(shape[1:], self.moved % 256, np.uint8 if name in self.cameras else np.float32)
            for name, shape in self.shapes.items()
        }

    def execute(self, action):
        self.moved += 1


def control(player, robot, rate, ticks):
    """The loop; returns milliseconds of each tick's two calls, (ticks, 2): by the wall and by this thread's processor."""
    took, due = np.empty((ticks, 2)), time.monotonic()
    for tick in range(ticks):
        observation = robot.observe()
        before = time.perf_counter(), time.thread_time()
        player.observe(observation)
        action = player.next_action()
        took[tick] = time.perf_counter() - before[0], time.thread_time() - before[1]
        if action is not None:
            robot.execute(action)
        due = max(due + 1 / rate, time.monotonic() - 1 / rate)  # after a stall no burst of ticks
        time.sleep(max(0.0, due - time.monotonic()))
    return took * 1e3


def spin():
    while True:
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy")
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--replan", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=0.05)
    parser.add_argument("--busy", action="store_true", help="Beside a process that keeps one core busy.")
    parser.add_argument("--rerun", metavar="FILE.rrd", help="Keep all of it for the Rerun viewer.")
    given = parser.parse_args()
    policy, file = open_export(given.policy, threads=1), None
    if given.rerun:
        from blockcache_runtime.rerun_file import RerunFile

        file = RerunFile(given.rerun)
    watcher = file.watcher("robot", given.rate) if file else None
    beside = multiprocessing.Process(target=spin, daemon=True) if given.busy else None
    if beside:
        beside.start()
    try:
        with Player(policy, given.rate, given.replan, watcher=watcher) as player:
            took = control(player, Robot(policy), given.rate, max(1, round(given.minutes * 60 * given.rate)))
            counters = player.counters
    finally:
        if beside:
            beside.terminate()
        if file:
            file.close()
    print(", ".join(f"{name} {count}" for name, count in counters.items()))
    for name, column in zip(("wall", "own processor time"), took.T, strict=True):
        p50, p99, most = np.percentile(column, [50, 99, 100])
        print(f"calls, {name}: p50 {p50:.3f}, p99 {p99:.3f}, most {most:.2f} ms; above 1 ms: {(column > 1).sum()}")


if __name__ == "__main__":
    main()
