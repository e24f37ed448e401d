"""The verb `demo`: the whole flow on the policy that ships with the package, in about a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blockcache.cli.arguments import load_observations
from blockcache.errors import ObservationError

if TYPE_CHECKING:
    from rich.table import Table

    from blockcache.experiments.tradeoff import Tradeoff


@click.command()
@click.option("--policy", "source", default="pusht", show_default=True, help="A policy directory or a shipped policy.")
@click.option("--generations", type=click.IntRange(min=1), default=8, show_default=True, help="To calibrate on.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Timed calls per method.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads for torch.")
def demo(source: str, generations: int, repeats: int, threads: int) -> None:
    """Calibrate, solve and accelerate the shipped Push-T policy, and compare what comes out.

    \b
    Examples:
      blockcache demo
      blockcache demo --policy my_policy/ --generations 16
    """
    import torch
    from rich.console import Console

    from blockcache.experiments.candidates import Calibrations
    from blockcache.experiments.methods import parse_method
    from blockcache.experiments.tradeoff import tradeoff
    from blockcache.policies import load_policy

    torch.set_num_threads(threads)
    console = Console(soft_wrap=True)
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
    calibrations = Calibrations(policy, observations[:generations])
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
