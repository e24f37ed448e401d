"""What the verbs that run many rollouts share: options, who does the work, how a run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blockcache.cli import arguments as arg
from blockcache.results.rollouts import GROUP

if TYPE_CHECKING:
    from blockcache.compare.jobs import Backend
    from blockcache.results.rollouts import Results

FAILED, INTERRUPTED = 1, 130  # exit codes

task_option = click.option("--task", type=arg.TASK, help="Default: the one that the policy says it was trained for.")
engine_option = click.option("--engine", type=arg.ENGINE, default="auto")


def run_options(verb: arg.Verb) -> arg.Verb:
    """How rollouts are run and what is calibrated on, in the order of the help."""
    options: list[Callable[[arg.Verb], arg.Verb]] = [
        task_option,
        click.option("--rollouts", type=arg.COUNT, default=50, help="Per method."),
        click.option("--group", type=arg.COUNT, default=GROUP, help="Rollouts run as one batch."),
        engine_option,
        click.option("--workers", type=arg.CORES, help="Processes on this machine. Default: one for each core."),
        click.option("--ray", metavar="ADDRESS", help="Use a Ray cluster instead; 'local' starts one here."),
        arg.observations_option,
        arg.generations_option,
    ]
    for option in reversed(options):  # as decorators are: the lowest first
        verb = option(verb)
    return verb


def chosen_backend(workers: int | None, ray: str | None) -> Backend:
    from blockcache.compare.jobs import local_workers, ray_cluster

    if ray is not None and workers is not None:
        raise click.UsageError("--ray and --workers exclude one another")
    return local_workers(workers) if ray is None else ray_cluster(ray)


@contextmanager
def resumable(state: Path) -> Iterator[None]:
    """An interrupt ends the verb with a word on where its finished work is kept."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was finished is kept in {state}, the same command goes on from there", err=True)
        raise SystemExit(INTERRUPTED) from None


def exit_if_failed(results: Results, path: str | Path) -> None:
    if results.failed:
        click.echo(
            f"error: {results.failed} rollouts failed; {path} holds their errors, the same command tries them again",
            err=True,
        )
        raise SystemExit(FAILED)


first_seed_option = click.option(
    "--first-seed", type=arg.SEED, default=0, help="First environment seed; test seeds are refused."
)
