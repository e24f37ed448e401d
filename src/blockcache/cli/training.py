"""The verbs on the way to a policy and its calibration: demonstrate, train, observe."""

from __future__ import annotations

from pathlib import Path

import click

from blockcache.cli.arguments import threads_option
from blockcache.files import check_writable


@click.command()
@click.argument("task")
@click.option("-o", "--output", required=True, metavar="FILE", help="The .npz file to write.")
@click.option("--episodes", type=click.IntRange(min=2), default=300, show_default=True, help="Successful ones.")
@click.option(
    "--noise",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Spread of what is added to the actions that are executed, in the task's units; what is kept is the expert's.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="First environment seed.")
def demonstrate(task: str, output: str, episodes: int, noise: float, seed: int) -> None:
    """Let the simulator's own expert show TASK, to train on. Episodes in which it fails are left out.

    \b
    Example:
      blockcache demonstrate metaworld-assembly -o assembly.npz
      blockcache train metaworld-assembly --data assembly.npz -o assembly --width 64 --layers 4 --lr 5e-3 --epochs 20
    """
    check_writable(output)

    from blockcache.training import demonstrate as run

    failed = run(task, output, episodes, noise=noise, first_seed=seed)
    click.echo(f"{output}: {episodes} episodes; the expert failed in {failed} more, which are left out")


@click.command()
@click.argument("task")
@click.option("--data", required=True, metavar="FILE", help="The demonstrations, a .npz file.")
@click.option("-o", "--output", required=True, metavar="DIR", help="The policy directory to write.")
@click.option("--width", default=256, show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--epochs", default=60, show_default=True)
@click.option(
    "--lr", default=6e-4, show_default=True, help="Highest learning rate; a narrow policy bears a higher one."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Threads for torch. Default: all cores.")
@click.option("--resume/--anew", default=True, show_default=True, help="Go on from the state beside the output.")
def train(
    task: str,
    data: str,
    output: str,
    width: int,
    layers: int,
    epochs: int,
    lr: float,
    seed: int,
    threads: int | None,
    resume: bool,
) -> None:
    """Train a DP-T policy for TASK from demonstrations. Killed at any moment, the same command goes on.

    \b
    Examples:
      blockcache train pusht --data pusht_cchi_v7_lowdim.npz -o my_policy
      nice -n 19 blockcache train pusht --data demos.npz -o small --width 128 --epochs 80
    """
    check_writable(Path(output).parent, directory=True)  # a policy takes its place as a whole

    from blockcache.training import TrainConfig
    from blockcache.training import train as run

    config = TrainConfig(task, width=width, layers=layers, epochs=epochs, lr=lr, seed=seed)
    click.echo(run(config, data, output, threads=threads, resume=resume))


@click.command()
@click.argument("task")
@click.argument("policy")
@click.option("-o", "--output", default="observations.npz", show_default=True)
@click.option("--episodes", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--count", type=click.IntRange(min=1), default=64, show_default=True, help="Observations to keep.")
@click.option("--seed", default=0, show_default=True, help="First environment seed; test seeds are refused.")
@threads_option
def observe(task: str, policy: str, output: str, episodes: int, count: int, seed: int, threads: int) -> None:
    """Let POLICY do TASK and keep what it saw, to calibrate on.

    \b
    Example:
      blockcache observe pusht my_policy/ -o my_policy/observations.npz
    """
    check_writable(output)

    import torch

    from blockcache.compare.observe import observe as run
    from blockcache.compare.observe import save_observations
    from blockcache.models.dpt import load_policy

    torch.set_num_threads(threads)
    obs = run(load_policy(policy), task, episodes, count, seed)
    save_observations(output, obs)
    click.echo(f"{output}: {len(obs)} observations of {episodes} episodes")


COMMANDS = (demonstrate, train, observe)
