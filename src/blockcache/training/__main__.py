"""`python -m blockcache.training TASK --data FILE --out DIRECTORY`: the recipe alone, from the shell."""

from __future__ import annotations

import click

from blockcache.errors import BlockcacheError
from blockcache.training import TrainConfig, train


@click.command()
@click.argument("task")
@click.option("--data", required=True, help="The demonstrations, an .npz file.")
@click.option("--out", required=True, help="The policy directory to write.")
@click.option("--width", default=TrainConfig.width, show_default=True)
@click.option("--layers", default=TrainConfig.layers, show_default=True)
@click.option("--epochs", default=TrainConfig.epochs, show_default=True)
@click.option("--seed", default=TrainConfig.seed, show_default=True)
@click.option("--threads", default=None, type=int, help="Threads of torch; all cores without it.")
@click.option("--resume/--anew", default=True, help="Go on from the state beside --out, if there is one.")
def main(
    task: str,
    data: str,
    out: str,
    width: int,
    layers: int,
    epochs: int,
    seed: int,
    threads: int | None,
    resume: bool,
) -> None:
    """Train a DP-T policy for TASK."""
    try:
        config = TrainConfig(task, width=width, layers=layers, epochs=epochs, seed=seed)
        click.echo(train(config, data, out, threads=threads, resume=resume))
    except BlockcacheError as error:
        raise click.ClickException(str(error)) from error


main()
