"""Success against delay, with paired differences: what a policy keeps when its chunks are late, told of it or not.

python examples/delays.py pusht/tuned --rollouts 100
"""

import argparse
from functools import partial

import numpy as np

from blockcache.cli.arguments import PolicySource
from blockcache.compare.clocks import choose_clock
from blockcache.compare.evaluation import prepare
from blockcache.compare.jobs import local_workers
from blockcache.measure.statistics import mean_interval, paired_difference

MODES = {
    "not told": {},
    "told": {"rtc": True},
    "told, soft": {"rtc": True, "overlap": 1000},
    "stop and think": {"stop": True, "replan": None},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", type=PolicySource)
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument("--first-seed", type=int, help="Default: the task's first test seed.")
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--replan", type=int, default=4)
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1, 2, 4], help="In control steps.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--state", default="delays.state", help="What is finished is kept here.")
    given = parser.parse_args()
    source, reference = given.policy, None
    print(
        f"{'delay':>5}  {'mode':14}  {'score, 95 %':22}  {'difference, 95 %':26}  success  stale  held    jerk    jump"
    )
    for delay in given.delays:
        for mode, settings in MODES.items():
            if delay == 0 and mode in ("told", "stop and think"):
                continue  # nothing is committed, and nobody need stop
            shared = {"rate": given.rate, "replan": given.replan, **settings}
            clock = partial(choose_clock, (delay / given.rate,), source.port.n_action_steps, **shared)
            ready = prepare(
                source.port,
                source.task(None),
                [],
                source.observations(None),
                state=given.state,
                source=str(source),
                rollouts=given.rollouts,
                first_seed=given.first_seed,
                clock=lambda name, clock=clock: clock(),
                progress=False,
            )
            results = ready.run(local_workers(given.workers), progress=False)
            score = [record.score for record in results.records]
            reference = score if reference is None else reference
            difference = paired_difference(score, reference).text("{:+.3f}") if score is not reference else ""
            success = np.mean([record.success for record in results.records])
            stale, held = (np.mean([getattr(item, name) for item in results.clocked]) for name in ("stale", "held"))
            jerk, jump = (np.mean([getattr(item, name) for item in results.records]) for name in ("jerk", "jump"))
            print(
                f"{delay:5}  {mode:14}  {mean_interval(score).text('{:.3f}'):22}  {difference:26}  {success:7.0%}  "
                f"{stale:5.2f}  {held:4.1f}  {jerk:6.3f}  {jump:6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
