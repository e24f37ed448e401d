"""The verb `check`: one schedule or method judged at recorded observations, without a simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.compare.methods import NAMES, parse_method
from blockcache.results.rollouts import GENERATIONS, OBSERVATIONS, SAMPLES
from blockcache_runtime.cores import cores

if TYPE_CHECKING:
    from blockcache.schedule import Schedule


def _method_or_schedule(text: str) -> tuple[Schedule | str, str]:
    """A schedule file or one of the paper's by name, read; else a method's name. And what it is called."""
    from blockcache.solvers.presets import published_names

    if Path(text).exists() or text.endswith(".json") or text in published_names():
        return arg.load_schedule(text), text
    name = parse_method(text).name
    return name, name


@click.command(epilog=f"\b\nMethods:\n{NAMES}")
@arg.policy_argument()
@click.argument("schedule")
@arg.observations_option
@click.option("-o", "--output", type=arg.OUTPUT, help="Keep the figures in this file (.json).")
@click.option("--count", type=click.IntRange(2, arg.MOST), default=OBSERVATIONS, help="Observations to compare at.")
@click.option(
    "--samples", type=click.IntRange(4, arg.MOST), default=SAMPLES, help="Chunks for each observation; an even number."
)
@click.option(
    "--generations",
    type=arg.COUNT,
    default=GENERATIONS,
    help="The first observations, to calibrate on; none of them is compared at.",
)
@click.option("--seed", type=arg.SEED, default=0, help="Of the noise and the choice of observations.")
@click.option("--engine", type=arg.ENGINE, default="auto")
@click.option("--threads", type=arg.CORES, default=cores, show_default="all cores", help="Threads for the engine.")
def check(
    policy: arg.PolicySource,
    schedule: str,
    observations: str | None,
    output: str | None,
    threads: int,
    **settings: Any,
) -> None:
    """Compare the actions of POLICY under SCHEDULE with those of the full policy, at recorded observations. No simulator.

    SCHEDULE is a schedule file, one of the paper's by name, or a method.

    \b
    Examples:
      blockcache check pusht schedule.json
      blockcache check pusht ddpm-10
      blockcache check my_module:make_policy bac:S=10,n=5,metric=mse --observations obs.npz -o check.json
    """
    chosen, name = _method_or_schedule(schedule)
    seen, moments = policy.observations(observations), policy.moments(observations)

    import torch

    from blockcache.compare.checker import check as run
    from blockcache.report.check import check_blocks
    from blockcache.report.terminal import display

    torch.set_num_threads(threads)
    found = run(policy.port, chosen, seen, moments=moments, source=str(policy), name=name, **settings)
    display(*check_blocks(found))
    if output is not None:
        found.save(output)
        click.echo(f"\nwritten to {output}")
