"""Which way of executing a policy is best? Successive halving on tuning seeds, then the winner on seeds nobody chose on.

python examples/halving.py pusht/tuned --noises 32 --reference docs/generated/records/frontier-pusht/frontier.json.gz

Besides what 'blockcache eval' takes there are two kinds of execution that are not in the library:
`noise=N`        constant noise, the same for every chunk: the policy becomes a function of what it sees.
`METHOD+warm=3`  a fitted sampler's last 3 steps only, from the rest of the chunk before, noised to where they begin.
"""

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from blockcache.cli.arguments import PolicySource
from blockcache.compare.candidates import Calibrations, running
from blockcache.compare.jobs import local_workers, run_jobs
from blockcache.compare.methods import parse_method
from blockcache.compare.paired import Group, Setting, rollout_noise, work
from blockcache.compare.parts import MethodError
from blockcache.compare.store import Store
from blockcache.files import digest, write_bytes
from blockcache.measure.statistics import paired_difference
from blockcache.results.rollouts import Results
from blockcache.samplers import table
from blockcache.samplers.fitted import WEIGHTS
from blockcache.tasks import make_task, rollout
from blockcache_runtime.execution import Execution

GROUP = 10


@dataclass(frozen=True)
class ConstantNoise(Execution):
    """Every chunk is drawn from the same noise, that of `seed`."""

    seed: int = 0
    keeps_noise = False

    def noise(self, drawn):
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn((len(drawn), 1, *drawn.shape[2:]), generator=generator).expand_as(drawn).contiguous()

    def describe(self):
        return {"constant_noise": self.seed}


@dataclass(frozen=True)
class WarmGroup(Group):
    """Rollouts whose first chunk is drawn as ever, and whose others are `steps` steps away from the one before."""

    steps: int = 3

    def describe(self, setting):
        return {**super().describe(setting), "warm": self.steps}

    def run(self, setting):
        port, replan = setting.port, self.candidate.execution.replan
        before = port.executed[0]
        if not replan or replan >= port.horizon - before:
            raise MethodError(
                f"a warm start goes on from what is left of the chunk before: replan must be below {port.horizon - before}, "
                f"got {replan}"
            )
        whole = self.candidate.sampler or port.sampler
        last = last_steps(whole, self.steps)
        power = float(last.power_at(np.array(last.timesteps[:1]))[0])
        scale, offset = (torch.as_tensor(value).float() for value in (port.action_scale, port.action_offset))
        old = None
        with running(port, self.candidate) as cold, running(port, replace(self.candidate, sampler=last)) as warm:

            def act(obs, chunk):
                nonlocal old
                fast, made = (cold, whole) if old is None else (warm, last)
                shape = (port.horizon, port.sample_dim)
                drawn = [rollout_noise([seed], chunk, table(made), shape) for seed in self.seeds]
                noise = torch.from_numpy(np.concatenate(drawn, axis=1))
                if old is not None:
                    rest = torch.as_tensor(old[:, replan - before :]).float() * scale + offset
                    rest = torch.cat([rest, rest[:, -1:].expand(-1, port.horizon - rest.shape[1], -1)], dim=1)
                    noise[0] = power**0.5 * rest + (1 - power) ** 0.5 * noise[0]
                old = fast.chunk(obs, None, noise, 0)
                return old[:, :replan]

            done = rollout(setting.make_task, act, self.seeds, n_obs_steps=port.n_obs_steps, n_action_steps=replan)
        return {"records": [{"seed": one.seed, "score": one.score, "error": one.error} for one in done], "seconds": 0.0}


def last_steps(sampler, steps):
    """The end of a fitted sampler; its first step has no x0 before it, so that weight goes to its own."""
    columns = {name: list(getattr(sampler, name)[-steps:]) for name in WEIGHTS}
    columns["b"][0], columns["c"][0] = columns["b"][0] + columns["c"][0], 0.0
    return replace(sampler, num_inference_steps=steps, timesteps=sampler.timesteps[-steps:], **columns)


def jobs_of(name, calibrations, constant):
    """What makes the job of a configuration of some seeds."""
    if name.startswith("noise="):
        base = calibrations.candidate(parse_method(constant), "onnx")
        return partial(Group, replace(base, execution=ConstantNoise(seed=int(name[6:]))))
    method, _, warm = name.partition("+warm=")
    found = calibrations.candidate(parse_method(method), "onnx")
    return partial(WarmGroup, found, steps=int(warm)) if warm else partial(Group, found)


def scores(setting, configurations, seeds, given):
    """Of every configuration on these seeds, by name and seed; finished groups are kept."""
    groups = [tuple(seeds[start : start + GROUP]) for start in range(0, len(seeds), GROUP)]
    jobs = {(name, group): make(seeds=group) for name, make in configurations.items() for group in groups}
    keys = {key: digest(job.describe(setting)) for key, job in jobs.items()}
    run = partial(run_jobs, partial(work, setting), store=Store(given.state), backend=local_workers(given.workers))
    done = run({keys[key]: job for key, job in jobs.items()})
    return {
        name: {item["seed"]: item["score"] for group in groups for item in done[keys[name, group]]["records"]}
        for name in configurations
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", type=PolicySource)
    parser.add_argument(
        "-m", "--method", action="append", default=[], help="As 'blockcache eval' takes them, or +warm=N."
    )
    parser.add_argument("--noises", type=int, default=0, help="So many constant noises besides.")
    parser.add_argument("--noise-of", default="full", help="The method that constant noises are drawn for.")
    parser.add_argument("--rounds", type=int, nargs="+", default=[30, 60, 120, 200], help="Tuning seeds by round.")
    parser.add_argument("--first-seed", type=int, default=90_000)
    parser.add_argument("--fresh", type=int, default=500, help="Fresh seeds.")
    parser.add_argument("--first-fresh", type=int, default=150_000)
    parser.add_argument("--report", type=int, default=1, help="So many of the last round are reported on fresh seeds.")
    parser.add_argument(
        "--reference",
        help="Results with the policy to compare with, in full, on the fresh seeds. Default: POLICY itself is rolled out.",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--state", default="halving.state", help="What is finished is kept here.")
    parser.add_argument("-o", "--output", default="halving.json", help="Every score by configuration and seed.")
    parser.add_argument("--page", default="halving.md", help="A table of the same.")
    given = parser.parse_args()
    port = given.policy.port
    setting = Setting(port, None, partial(make_task, given.policy.task(None)))
    calibrations = Calibrations(port, given.policy.observations(None))
    names = [*given.method, *(f"noise={seed}" for seed in range(given.noises))]
    alive, rounds = {name: jobs_of(name, calibrations, given.noise_of) for name in names}, []
    for upto in given.rounds:
        seeds = range(given.first_seed, given.first_seed + upto)
        found = scores(setting, alive, seeds, given)
        means = {name: float(np.mean(list(one.values()))) for name, one in found.items()}
        ranked = sorted(means, key=means.__getitem__, reverse=True)
        rounds.append({name: found[name] for name in ranked})
        print(f"seeds {seeds[0]} to {seeds[-1]}:", *(f"\n  {means[name]:.3f}  {name}" for name in ranked), flush=True)
        if upto != given.rounds[-1]:
            alive = {name: alive[name] for name in ranked[: max(given.report, (len(ranked) + 1) // 2)]}
    fresh = range(given.first_fresh, given.first_fresh + given.fresh)
    chosen = {name: alive[name] for name in ranked[: given.report]}
    if given.reference is None:
        own = scores(setting, {"full": jobs_of("full", calibrations, "full")}, fresh, given)["full"]
    else:
        own = {seed: record.score for seed, record in Results.load(given.reference).of("full").items()}
    last = scores(setting, chosen, fresh, given)
    reference = f"`{given.policy}` as it is" if given.reference is None else f"full precision in `{given.reference}`"
    lines = [
        f"Policy `{given.policy}`, tuning seeds from {given.first_seed}, fresh seeds {fresh[0]} to {fresh[-1]}. Made by",
        f"`python {shlex.join(sys.argv)}`.",
        "",
        f"| configuration | mean score on the first tuning seeds | fresh seeds | difference to {reference} |",
        "|---|---|---|---|",
    ]
    for name in names:
        seen = ", ".join(f"{np.mean([*one[name].values()]):.3f} ({len(one[name])})" for one in rounds if name in one)
        columns = ["", ""]
        if name in last:
            found = paired_difference([last[name][seed] for seed in fresh], [own[seed] for seed in fresh])
            interval = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
            columns = [f"{np.mean([*last[name].values()]):.3f} ({found.n})", interval]
        lines.append(f"| `{name}` | {seen} | {' | '.join(columns)} |")
    write_bytes(given.page, ("\n".join(lines) + "\n").encode())
    content = {
        "format": "halving",
        "policy": str(given.policy),
        "rounds": rounds,
        "fresh": last,
        "full": {seed: own[seed] for seed in fresh},
    }
    write_bytes(given.output, json.dumps(content).encode())
    print("\n".join(lines))


if __name__ == "__main__":
    main()
