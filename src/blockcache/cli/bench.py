"""The verbs around engines: export, bench."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from blockcache.cli.arguments import load_schedule, refuse_sizes_beside_a_policy
from blockcache.cores import cores
from blockcache.files import check_writable


@click.command()
@click.argument("policy")
@click.argument("schedule", required=False)
@click.option("-o", "--output", default="policy.onnx", show_default=True, help="The file to write.")
@click.option("--actions-only", is_flag=True, help="Leave out what the robot does not execute (causal policies).")
@click.option("--other-weights", is_flag=True, help="Accept a schedule that was made for other weights.")
def export(policy: str, schedule: str | None, output: str, actions_only: bool, other_weights: bool) -> None:
    """Write POLICY under SCHEDULE as one ONNX file: observation and noise in, actions in robot units out.

    Without a SCHEDULE the file is full precision. It needs no Python, no cache and no policy code to run;
    blockcache.deploy (docs/deploy.md) runs it with numpy and onnxruntime alone.

    \b
    Examples:
      blockcache export pusht schedule.json -o pusht.onnx
      blockcache export pusht square_ph --actions-only -o fast.onnx
      blockcache export pusht -o full.onnx
    """
    check_writable(output)

    from blockcache.engines import export_policy
    from blockcache.models.dpt import load_policy

    loaded = load_policy(policy)
    followed = None if schedule is None else load_schedule(schedule)
    kind, check = "action" if actions_only else "chunk", "shape" if other_weights else "strict"
    export_policy(loaded, followed, output, kind, check)
    click.echo(f"{output}: {os.path.getsize(output) / 1e6:.1f} MB")


@click.command()
@click.option("--policy", help="Measure this policy (directory or shipped name) instead of random weights.")
@click.option("--schedule", help="A schedule file or a printed one. Default: the paper's square_ph, stretched to fit.")
@click.option("--width", default=256, show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--horizon", default=10, show_default=True)
@click.option("--sampler", default="ddpm", show_default=True, help="ddpm, ddim, dpmsolver++ or sde-dpmsolver++.")
@click.option("--steps", default=100, show_default=True, help="Denoising steps.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Measure with 1 and this many threads. Default: all cores.")
@click.option("--repeats", type=click.IntRange(min=2), default=20, show_default=True, help="Interleaved rounds.")
@click.option("--quick", is_flag=True, help="Engines only, 5 rounds.")
@click.option("--json", "json_path", metavar="FILE", help="Write all figures here.")
@click.option("--plot", metavar="FILE.png", help="Draw the table.")
def bench(
    policy: str | None,
    schedule: str | None,
    threads: int | None,
    repeats: int,
    quick: bool,
    json_path: str | None,
    plot: str | None,
    **sizes: Any,
) -> None:
    """Time every engine beside what users run today, all in one interleaved run.

    Leave the machine alone while it runs. The last line is a summary as JSON.

    \b
    Examples:
      blockcache bench
      blockcache bench --quick
      blockcache bench --width 768 --horizon 16 --threads 2 --json bench.json --plot bench.png
      blockcache bench --policy pusht --schedule schedule.json
    """
    for path in filter(None, (json_path, plot)):
        check_writable(path)

    from blockcache.models.dpt import load_policy
    from blockcache.report.figures import require_matplotlib
    from blockcache.report.performance import bench_table, not_available, plot_bench
    from blockcache.report.terminal import display
    from blockcache.studies.bench import FORMAT, Shape, preset_for, run_bench

    if plot:
        require_matplotlib()
    if policy:
        refuse_sizes_beside_a_policy(set(sizes) - {"batch"})
    shape = Shape(**sizes)
    loaded = load_policy(policy) if policy else shape.policy()
    if policy:
        config = loaded.config
        shape = Shape(
            width=config.n_emb,
            layers=config.n_layer,
            heads=config.n_head,
            horizon=config.horizon,
            n_obs_steps=config.n_obs_steps,
            obs_dim=config.obs_dim,
            action_dim=config.action_dim,
            n_action_steps=config.n_action_steps,
            sampler=loaded.sampler.type,
            steps=loaded.num_inference_steps,
            batch=shape.batch,
        )
    followed = load_schedule(schedule) if schedule else preset_for(shape)
    most = threads or cores()
    result = run_bench(shape, loaded, followed, threads=most, repeats=5 if quick else repeats, quick=quick)
    figures = result.to_dict()
    display(bench_table(figures["rows"]), not_available(figures))
    if json_path:
        FORMAT.save(json_path, figures)
    if plot:
        plot_bench(figures, plot)
    click.echo(
        json.dumps(
            {row.name: {"p50_ms": round(row.p50_ms, 3), "speedup": round(row.speedup, 2)} for row in result.rows}
        )
    )


@click.command()
@click.option(
    "-o", "--output", default="docs", show_default=True, help="Directory for performance.json, .md and pictures."
)
@click.option("--repeats", type=click.IntRange(min=2), default=30, show_default=True)
@click.option("--render-only", is_flag=True, help="Write the page anew from performance.json, measure nothing.")
def performance(output: str, repeats: int, render_only: bool) -> None:
    """Measure everything that docs/performance.md shows, and write the page. About ten minutes on two idle cores.

    \b
    Examples:
      blockcache performance -o docs
      blockcache performance -o docs --render-only
    """
    check_writable(output, directory=True)

    from pathlib import Path

    from blockcache.files import make_directory, write_bytes
    from blockcache.report.figures import require_matplotlib
    from blockcache.report.markdown import render
    from blockcache.report.performance import (
        BENCH_PICTURE,
        FORMAT,
        GROWTH_PICTURE,
        page,
        plot_bench,
        plot_growth,
    )

    require_matplotlib()
    directory = Path(output)
    source = directory / "performance.json"
    if not render_only:
        measured = _measure_everything(repeats)
        make_directory(directory)
        FORMAT.save(source, measured)
    results = FORMAT.load(source)
    plot_bench(results["bench"], directory / BENCH_PICTURE)
    plot_growth(results["growth"], directory / GROWTH_PICTURE)
    write_bytes(directory / "performance.md", render(page(results)).encode())
    click.echo(f"{directory / 'performance.md'}")


def _measure_everything(repeats: int) -> dict[str, Any]:
    from blockcache.studies.bench import Shape, preset_for, run_bench
    from blockcache.studies.scaling import compare_shapes, footprint, growth

    shape = Shape()
    click.echo("1/4 benchmark")
    bench = run_bench(shape, shape.policy(), preset_for(shape), threads=cores(), repeats=repeats).to_dict()
    for row in bench["rows"]:
        del row["samples_ms"]
    click.echo("2/4 other shapes")
    shapes = compare_shapes(cores(), repeats=7)
    click.echo("3/4 growth")
    grown = growth(repeats=15)
    click.echo("4/4 memory and long runs")
    feet = {
        "8 x 256, T = 10": footprint(shape, calls=300, generations=1000),
        "8 x 768, T = 16": footprint(Shape(width=768, horizon=16), calls=30, generations=20),
    }
    return {"bench": bench, "shapes": shapes, "growth": grown, "footprint": feet}


COMMANDS = (export, bench, performance)
