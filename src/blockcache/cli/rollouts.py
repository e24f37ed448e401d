"""What the verbs that run many rollouts share: options, who does the work, how a run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from blockcache.compare.results import GENERATIONS, GROUP

if TYPE_CHECKING:
    from blockcache.compare.jobs import Backend
    from blockcache.compare.results import Results

FAILED, INTERRUPTED = 1, 130  # exit codes
POSITIVE = click.IntRange(min=1)
Verb = TypeVar("Verb", bound=Callable[..., Any])

rollouts_option = click.option("--rollouts", type=POSITIVE, default=50, show_default=True, help="Per method.")


def run_options(verb: Verb) -> Verb:
    """How rollouts are run and what is calibrated on: --group to --generations, in the order of the help."""
    engines = click.Choice(["auto", "patched", "loop", "onnx"])
    options: list[Callable[[Verb], Verb]] = [
        click.option("--group", type=POSITIVE, default=GROUP, show_default=True, help="Rollouts run as one batch."),
        click.option("--engine", type=engines, default="auto", show_default=True),
        click.option("--workers", type=POSITIVE, help="Processes on this machine. Default: one for each core."),
        click.option("--ray", metavar="ADDRESS", help="Use a Ray cluster instead; 'local' starts one here."),
        click.option("--observations", metavar="FILE", help="To calibrate on, a .npz. Default: the policy's own."),
        click.option("--generations", type=POSITIVE, default=GENERATIONS, show_default=True, help="To calibrate on."),
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
