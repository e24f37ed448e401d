"""The verb `demo`: the whole flow on the policy that ships with the package, in a few minutes."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import click

from blockcache.cli.arguments import load_observations
from blockcache.errors import ObservationError, TaskError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from blockcache.compare.candidates import Calibrations
    from blockcache.measure.statistics import Estimate
    from blockcache.models.dpt import DiffusionTransformerPolicy
    from blockcache.report.stored import Stored
    from blockcache.studies.showcase import Showcase
    from blockcache.studies.tradeoff import Tradeoff


WIDTH = 120  # of the tables, at least: a pipe counts as 80 columns, which would cut their figures


@click.command()
@click.option("--policy", "source", default="pusht", show_default=True, help="A policy directory or a shipped policy.")
@click.option("--generations", type=click.IntRange(min=1), default=16, show_default=True, help="To calibrate on.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Timed calls per method.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads for torch.")
@click.option(
    "--seconds",
    type=click.IntRange(min=0),
    default=150,
    show_default=True,
    help="For rollouts in the simulator; 0 leaves them out.",
)
def demo(source: str, generations: int, repeats: int, threads: int, seconds: int) -> None:
    """Calibrate, solve and accelerate the shipped Push-T policy, and compare what comes out.

    First open loop: speed, and how far the actions are from the full policy's. Then closed loop: how well the task is
    done, in as many rollouts as the time allows.

    \b
    Examples:
      blockcache demo
      blockcache demo --seconds 600
      blockcache demo --seconds 0
      blockcache demo --policy my_policy/ --generations 16
    """
    import torch
    from rich.console import Console

    from blockcache.compare.candidates import Calibrations
    from blockcache.models.dpt import load_policy

    torch.set_num_threads(threads)
    console = Console(soft_wrap=True, width=max(WIDTH, Console().width))
    policy = load_policy(source)
    config = policy.config
    console.print(
        f"[bold]{source}[/bold]: {config.n_layer} layers x {config.n_emb}, {policy.num_inference_steps} "
        f"{policy.sampler.type.upper()} steps, {sum(p.numel() for p in policy.model.parameters()) / 1e6:.2f} M parameters"
    )
    observations = load_observations(policy, source, None)
    if len(observations) <= generations:
        raise ObservationError(
            f"the policy brings {len(observations)} observations; {generations} to calibrate on leave none to compare on"
        )
    with tempfile.TemporaryDirectory() as kept:  # one calibration for both comparisons
        _open_loop(console, Calibrations(policy, observations[:generations], keep=kept), observations, repeats)
        if seconds:
            _closed_loop(console, policy, source, observations, generations, seconds, kept)


def _open_loop(console: Console, calibrations: Calibrations, observations: Tensor, repeats: int) -> None:
    import torch

    from blockcache.compare.methods import parse_method
    from blockcache.studies.tradeoff import tradeoff

    policy, generations, threads = calibrations.policy, len(calibrations.observations), torch.get_num_threads()
    recording = calibrations.recording(policy.sampler)
    console.print(f"calibrated on {recording.generations} generations in {recording.origin['seconds']:.0f} s\n")
    methods = {
        "DDIM, 16 steps": calibrations.candidate(parse_method("ddim-16"), engine=None),
        "Uniform, S = 10": calibrations.candidate(parse_method("uniform:S=10"), "patched"),
        "BAC, S = 10, n = 5": calibrations.candidate(parse_method("bac:S=10,n=5"), "patched"),
        "BAC, S = 10, n = 5 ": calibrations.candidate(parse_method("bac:S=10,n=5")),
        "BAC, S = 20, n = 5 ": calibrations.candidate(parse_method("bac:S=20,n=5")),
        "full precision ": calibrations.candidate(parse_method("full")),
    }
    result = tradeoff(policy, methods, observations[generations : generations + 32], repeats=repeats)
    console.print(_table(result))
    console.print(
        f"\nAction error: mean absolute difference to the full policy with the same noise, executed slice, normalised "
        f"units.\nNoise floor (two full runs, different noise): {result.noise_floor.mean:.3f}. Medians of {repeats} "
        f"interleaved rounds, batch 1, {threads} torch thread{'s' if threads > 1 else ''}."
    )


def _closed_loop(
    console: Console,
    policy: DiffusionTransformerPolicy,
    source: str,
    observations: Tensor,
    generations: int,
    seconds: int,
    kept: str,
) -> None:
    from blockcache.compare.jobs import local_workers
    from blockcache.report.stored import shipped
    from blockcache.studies.showcase import showcase
    from blockcache.tasks import make_task

    try:
        if policy.config.task is None:
            raise TaskError("the policy does not say which task it was trained for")
        make_task(policy.config.task).close()  # a missing simulator shows now
        console.print(f"\nNow in the simulator, for about {seconds} s:")
        found = showcase(
            policy,
            policy.config.task,
            observations,
            seconds,
            state=kept,
            generations=generations,
            source=source,
            backend=local_workers(),
        )
    except TaskError as error:
        console.print(f"\nNo rollouts here: {error}.", markup=False)
        return
    stored = shipped()
    weights = found.results.policy["fingerprint"]["weights"]
    fits = stored is not None and (stored.task, stored.weights) == (found.results.task["name"], weights)
    _print_closed_loop(console, found, stored if fits else None)


def _print_closed_loop(console: Console, found: Showcase, stored: Stored | None) -> None:
    from rich.table import Table

    from blockcache.compare.results import PLAIN
    from blockcache.compare.summary import summarise
    from blockcache.report.suites import label

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method")
    table.add_column("engine")
    for column in (
        "ms",
        "speed-up",
        "GFLOP",
        "score",
        "difference to full, 95 %",
        *(["stored, 95 %"] if stored else []),
    ):
        table.add_column(column, justify="right")
    for row in summarise(found.results):
        name, seconds = row.method.name, found.speed[row.method.name]
        cells = [
            label(name),
            row.method.engine,
            f"{seconds.p50 * 1e3:.0f}",
            f"{seconds.over(found.speed[PLAIN]):.1f}x",
            f"{row.method.flops / 1e9:.2f}",
            "-" if row.score is None else f"{row.score.mean:.3f}",
            _estimate(row.difference),
        ]
        before = stored.of(name) if stored else None
        table.add_row(*cells, *([_estimate(None if before is None else before.difference)] if stored else []))
    console.print()
    console.print(table)
    task, setting = found.results.task, found.results.setting
    console.print(
        f"\nMean score of {setting['rollouts']} rollouts on {task['name']} (test seeds from {setting['first_seed']}); the "
        "same episodes for all, so differences are paired.\nSo few rollouts leave the intervals wide: "
        f"'blockcache eval {task['name']}' runs more. Speed-up over the plain policy in torch, which takes "
        f"{found.speed[PLAIN].p50 * 1e3:.0f} ms."
    )
    if found.results.failed:
        console.print(f"The simulator failed in {found.results.failed} rollouts, which are left out.")
    if stored:
        console.print(
            "Stored: not measured now but kept with the package, from 'blockcache suite main' on this very policy,\n"
            f"calibrated on {stored.calibration['generations']} generations (docs/results.md)."
        )


def _estimate(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.text('{:+.3f}')}, n = {value.n}"


def _table(result: Tradeoff) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method")
    table.add_column("engine")
    for column in ("ms", "speed-up", "GFLOP", "reused", "action error"):
        table.add_column(column, justify="right")
    for row in result.rows:
        table.add_row(
            row.name,
            row.engine,
            f"{row.latency.p50 * 1e3:.0f}",
            f"{row.speedup:.1f}x",
            f"{row.flops / 1e9:.2f}",
            f"{row.reused:.0%}",
            "-" if row.error is None else f"{row.error.mean:.3f}",
        )
    return table


COMMANDS = (demo,)
