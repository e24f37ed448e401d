"""The verb `demo`: the whole flow on the policy that ships with the package, in about a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blockcache.cli.arguments import load_observations

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

    from blockcache.experiments.tradeoff import Method, fewer_steps, tradeoff
    from blockcache.policies import load_policy
    from blockcache.recorder import calibrate
    from blockcache.solvers import solve

    torch.set_num_threads(threads)
    console = Console(soft_wrap=True)
    policy = load_policy(source)
    config = policy.config
    console.print(
        f"[bold]{source}[/bold]: {config.n_layer} layers x {config.n_emb}, {policy.num_inference_steps} "
        f"{policy.sampler.type.upper()} steps, {sum(p.numel() for p in policy.model.parameters()) / 1e6:.2f} M parameters"
    )
    observations = load_observations(policy, source, None)
    recording = calibrate(policy, [batch[None] for batch in observations[:generations]])
    console.print(f"calibrated on {recording.generations} generations in {recording.origin['seconds']:.0f} s\n")
    ten, twenty = solve(recording, updates=10, union=5), solve(recording, updates=20, union=5)
    uniform = solve(recording, updates=10, method="uniform")
    methods = {
        "DDIM, 16 steps": Method(sampler=fewer_steps(policy.sampler, "ddim", 16)),
        "Uniform, S = 10": Method(uniform, "patched"),
        "BAC, S = 10, n = 5": Method(ten, "patched"),
        "BAC, S = 10, n = 5 ": Method(ten, "auto"),
        "BAC, S = 20, n = 5 ": Method(twenty, "auto"),
        "full precision ": Method(None, "auto"),
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
