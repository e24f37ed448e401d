"""The verbs `policy demonstrate`, `policy pretrain`, `policy train` and `policy replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from blockcache.cli import arguments as arg
from blockcache.files import check_writable, opened


def _demonstrations(path: str) -> str:
    with opened(path, "demonstrations"):
        return path


def _policy_to_write(path: str) -> str:
    check_writable(Path(path).parent, directory=True)  # a policy takes its place as a whole
    return path


task_argument = click.argument("task", type=arg.TASK)
data_option = click.option(
    "--data", type=arg.CheckedText("file", _demonstrations), required=True, help="The demonstrations, a .npz file."
)
output_option = click.option(
    "-o",
    "--output",
    type=arg.CheckedText("directory", _policy_to_write),
    required=True,
    help="The policy directory to write.",
)
threads_option = click.option("--threads", type=arg.CORES, help="Threads for torch. Default: all cores.")
resume_option = click.option("--resume/--anew", default=True, help="Go on from the state beside the output.")


@click.command()
@task_argument
@click.option("-o", "--output", type=arg.OUTPUT, required=True, help="The .npz file to write.")
@click.option("--episodes", type=click.IntRange(2, arg.MOST), default=300, help="Successful episodes to keep.")
@click.option(
    "--noise",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    help="Spread of what is added to the actions that are executed, in the task's units; what is kept is the expert's.",
)
@click.option(
    "--every",
    type=click.IntRange(1, arg.MOST),
    default=1,
    help="Noise in one of so many steps only, drawn at random: the steps between then show how to recover.",
)
@click.option(
    "--lasting",
    type=click.IntRange(1, arg.MOST),
    default=1,
    help="Steps for which a disturbance stays the same: a push, from which an expert without phases comes back.",
)
@arg.first_seed_option
def demonstrate(task: str, output: str, episodes: int, noise: float, every: int, lasting: int, first_seed: int) -> None:
    """Let the simulator's own expert show TASK, to train on. Episodes in which it fails are left out.

    \b
    Examples:
      blockcache policy demonstrate metaworld-assembly -o assembly.npz
      blockcache policy demonstrate robosuite-square-ph -o square.npz --noise 0.9 --every 40 --lasting 5
    """
    from blockcache.tasks import expert_factory

    expert_factory(task)  # a task without one says so before torch is loaded

    from blockcache_lab.training import demonstrate as run

    found = run(task, output, episodes, noise=noise, every=every, lasting=lasting, first_seed=first_seed)
    click.echo(f"{output}: {found.kept} episodes; the expert failed in {found.failed} more, which are left out")
    if found.errors:
        click.echo(f"{sum(found.errors.values())} more ended with an error, and are left out too:")
    for error, times in found.errors.items():
        click.echo(f"  {times} x {error}")


@click.command()
@task_argument
@data_option
@output_option
@click.option(
    "--family",
    type=click.Choice(["dpt", "rdt", "dit"]),
    default="dpt",
    help="rdt needs a task that shows language and image tokens, dit one that shows a row of numbers.",
)
@click.option(
    "--objective",
    type=click.Choice(["ddpm", "flow"]),
    help="What a dit learns: noise, for 100 DDPM steps, or a flow, for 10 Euler steps. Default: ddpm.",
)
@click.option("--width", type=arg.SIZE, default=256, help="Width of the transformer.")
@click.option("--layers", type=arg.LAYERS, default=8, help="Layers of the transformer.")
@click.option("--horizon", type=arg.SIZE, help="Actions that are generated at once. Default: 10 of dpt, 16 of others.")
@click.option("--obs-steps", "n_obs_steps", type=arg.SIZE, help="Observations that are seen. Default: 2, of rdt 1.")
@click.option("--action-steps", "n_action_steps", type=arg.SIZE, default=8, help="Those of them that are executed.")
@click.option("--epochs", type=arg.COUNT, default=60, help="Passes over the demonstrations.")
@click.option("--lr", default=6e-4, help="Highest learning rate; a narrow policy can take a higher one.")
@click.option(
    "--dropout",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Dropout of attention and feed-forward layers in training; for dpt only.",
)
@click.option(
    "--start",
    type=click.Choice(["public", "scaled"]),
    default="public",
    help="Weights that learning begins with: the public recipe's, or scaled by each layer's width; for dpt only.",
)
@click.option("--batch", type=arg.COUNT, default=128, help="Windows in one step.")
@click.option(
    "--trunk", type=arg.SIZE, help="Width of the cameras' networks, a multiple of 16. Default: 64, ResNet18's."
)
@click.option("--crop", type=arg.SIZE, help="Side of what cameras look at, in pixels. Default: 4/5 of the frame's.")
@click.option(
    "--from", "begin", type=arg.POLICY, help="Begin with the weights of this policy, which has the same sizes."
)
@click.option("--frozen", is_flag=True, help="Leave its cameras' networks as they are; every frame is encoded once.")
@click.option("--seed", type=arg.SEED, default=0, help="Of the weights, the noise and the order of the data.")
@threads_option
@resume_option
@click.option(
    "--keep-last",
    type=click.IntRange(0, arg.MOST),
    default=0,
    help="Keep the policies of so many last epochs, in OUTPUT.checkpoints, for 'paper checkpoints'.",
)
def train(task: str, data: str, output: str, begin: Any, **settings: Any) -> None:
    """Train a policy for TASK from demonstrations. Killed at any moment, the same command goes on.

    \b
    Examples:
      blockcache policy train pusht --data pusht_cchi_v7_lowdim.npz -o my_policy
      blockcache policy train metaworld-assembly --data assembly.npz -o assembly --width 64 --layers 4 --lr 5e-3
      blockcache policy train pusht-image --data pusht_cchi_v7_lowdim.npz -o camera_policy --trunk 32 --batch 64
      blockcache policy train maniskill-push-cube --family rdt --data push.npz -o push --width 128 --layers 4 --lr 1e-3
      blockcache policy train metaworld-assembly --family dit --objective flow --data assembly.npz -o flow --width 128
      blockcache policy train block-pushing --data demos.npz -o p --horizon 5 --obs-steps 3 --action-steps 1 --dropout 0.3
      nice -n 19 blockcache policy train pusht --data demos.npz -o small --width 128 --epochs 80
    """
    from blockcache_lab.training import TrainConfig
    from blockcache_lab.training import train as run

    how = {name: settings.pop(name) for name in ("threads", "resume", "keep_last")}
    click.echo(run(TrainConfig(task, **settings), data, output, begin=begin and begin.name, **how))


@click.command()
@task_argument
@click.option("--from", "taught", type=arg.POLICY, required=True, help="A policy that sees TASK's scenes as numbers.")
@output_option
@click.option("--epochs", type=arg.COUNT, default=40, help="Epochs of 100 steps.")
@click.option("--lr", default=2e-3, help="Highest learning rate.")
@click.option("--batch", type=arg.COUNT, default=64, help="Frames in one step.")
@click.option("--trunk", type=arg.SIZE, default=16, help="Width of the camera's network, a multiple of 16.")
@click.option("--seed", type=arg.SEED, default=0, help="Of the weights and the scenes.")
@threads_option
@resume_option
def pretrain(task: str, taught: Any, output: str, threads: int | None, resume: bool, **settings: Any) -> None:
    """Give a policy a camera: an encoder learns to tell from frames of TASK the numbers that the policy sees.

    The frames are of scenes at random. The new policy has the other one's denoiser; 'policy train --from' goes on.

    \b
    Example:
      blockcache policy pretrain pusht-image --from pusht -o seeing
    """
    from blockcache_lab.training.pretraining import pretrain as run

    click.echo(run(task, taught.name, output, settings=settings, threads=threads, resume=resume))


@click.command()
@task_argument
@data_option
@click.option("--episodes", type=arg.COUNT, help="How many, from the first. Default: all.")
@arg.first_seed_option
def replay(task: str, data: str, episodes: int | None, first_seed: int) -> None:
    """Play demonstrations again in the simulator of TASK: do they end as they were recorded, and is the same seen?

    \b
    Example:
      blockcache policy replay block-pushing --data blockpush_multimodal_regenerated_seed0-999.npz
    """
    from blockcache_lab.training.replay import replay as run

    found = run(task, data, first_seed=first_seed, episodes=episodes)
    count, alike = len(found.as_recorded), sum(found.as_recorded)
    exact = sum(residual == 0 for residual in found.residuals)
    ordered = sorted(found.residuals)
    click.echo(f"{alike} of {count} episodes end as recorded ({alike / count:.1%})")
    click.echo(
        f"observations: {exact} episodes are equal to the last bit; largest difference of an episode: ", nl=False
    )
    click.echo(f"median {ordered[count // 2]:.3g}, most {ordered[-1]:.3g}; ", nl=False)
    click.echo(f"median over the steps of the worst: {max(found.medians):.3g}")
