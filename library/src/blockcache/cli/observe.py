"""The verb `policy observe`: what a policy sees while it does its task."""

from __future__ import annotations

import click

from blockcache.cli import arguments as arg
from blockcache.cli.rollouts import first_seed_option, task_option


@click.command()
@arg.policy_argument()
@task_option
@click.option("-o", "--output", type=arg.OUTPUT, default="observations.npz", help="The file to write.")
@click.option("--episodes", type=arg.COUNT, default=16)
@click.option("--count", type=arg.COUNT, default=64, help="Observations to keep.")
@first_seed_option
@click.option("--behind", metavar="FILE", help="A file of observations that shall stay in front of the new ones.")
@arg.threads_option
def observe(
    policy: arg.PolicySource,
    task: str | None,
    output: str,
    episodes: int,
    count: int,
    first_seed: int,
    behind: str | None,
    threads: int,
) -> None:
    """Let POLICY do its task and keep what it saw over whole episodes, to calibrate on and to check schedules with.

    \b
    Examples:
      blockcache policy observe my_policy/ -o my_policy/observations.npz
      blockcache policy observe my_module:make_policy --task pusht --episodes 32 --count 128
      blockcache policy observe my_policy/ --behind seen.npz --first-seed 1000 -o more.npz
    """
    chosen = policy.task(task)
    before = None if behind is None else (policy.observations(behind), policy.moments(behind))

    import torch

    from blockcache.compare.observe import observe as run

    torch.set_num_threads(threads)
    seen = run(policy.port, chosen, episodes, count, first_seed)
    if before is not None:
        seen = seen.behind(*before)
    seen.save(output)
    more = "" if before is None else f", {count} of them new, "
    click.echo(f"{output}: {len(seen)} observations{more or ' '}of {episodes} episodes")
