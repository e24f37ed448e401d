"""Push-T in real time, driven by vla-eval's own live runner through a server: scores, stale actions, effective rate.

python examples/serve_live.py pusht/tuned --episodes 20                 (an export, or whatever 'blockcache serve' takes)
python examples/serve_live.py pusht --engine patched --episodes 20      (plain torch)
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import anyio
import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.connection import Connection
from vla_eval.runners.live_runner import LiveEpisodeRunner

from blockcache.tasks import make_task

FIRST_SEED = 180_000


class PushT(StepBenchmark):
    def __init__(self):
        super().__init__()
        self.task = make_task("pusht")

    def get_tasks(self):
        return []

    def reset(self, task):
        return self.task.reset(task["seed"])

    def step(self, action):
        self.task.step(np.asarray(action["actions"]))
        return StepResult(self.task.observe(), 0.0, self.task.done, {})

    def make_obs(self, raw, task):
        return {"obs": raw}

    def get_step_result(self, result):
        return {"success": self.task.success, "score": self.task.score}

    def get_hold_action(self, last_action):
        return last_action or {"actions": self.task.state[:2]}  # an action is a place to go to


async def run(port, episodes, rate):
    found, benchmark = [], PushT()
    async with Connection(f"ws://127.0.0.1:{port}") as connection:
        for seed in range(FIRST_SEED, FIRST_SEED + episodes):
            task = {"name": "pusht", "seed": seed}
            found.append(await LiveEpisodeRunner(hz=rate).run_episode(benchmark, task, connection, max_steps=300))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy")
    parser.add_argument("--engine", help="Of 'blockcache serve'.")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--rate", type=float, default=10.0)
    given = parser.parse_args()
    words = [given.policy, "--protocol", "vla-eval", "--port", "0", "--threads", "1"]
    engine = ["--engine", given.engine] if given.engine else []
    command = [Path(sys.executable).with_name("blockcache"), "serve", *words, *engine]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = server.stdout.readline()
        print(said.strip(), flush=True)
        found = anyio.run(run, int(re.search(r":(\d+) ", said)[1]), given.episodes, given.rate)
    finally:
        server.terminate()
        server.wait(30)
    scores = [one["metrics"]["score"] for one in found]
    stale, rate = (
        np.mean([one["rt_metrics"][name] for one in found]) for name in ("stale_action_ratio", "effective_control_hz")
    )
    error = np.std(scores, ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else float("nan")
    print(
        f"{len(found)} episodes: score {np.mean(scores):.3f} +- {error:.3f}, stale {stale:.1%}, {rate:.1f} actions a second"
    )


if __name__ == "__main__":
    main()
