"""Of the group `paper`: what is measured without a simulator (performance, flops), and its pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from blockcache.cli import arguments as arg
from blockcache.files import make_directory, write_bytes
from blockcache_runtime.cores import cores

ALIKE = ("metaworld-assembly", "metaworld-pick-place", "metaworld-peg-insert-side")
"""Policies of other tasks that observe the same numbers."""


@click.command()
@click.option(
    "-o", "--output", type=arg.OUTPUT_DIRECTORY, default="out", help="Directory for the figures and the page."
)
@click.option("--render-only", is_flag=True, help="Write the page from the figures that are there; measure nothing.")
@click.option("--repeats", type=click.IntRange(2, arg.MOST), default=30, help="Interleaved rounds.")
def performance(output: Path, render_only: bool, repeats: int) -> None:
    """Measure everything that the page on performance shows, and write the page. About ten minutes on two idle cores.

    \b
    Examples:
      blockcache paper performance
      blockcache paper performance -o docs/generated --render-only
    """
    from blockcache.report.bench import bench_chart
    from blockcache.report.drawing import draw, require_matplotlib, save_figure
    from blockcache.report.markdown import render
    from blockcache_lab.pages.performance import BENCH_PICTURE, FORMAT, page

    require_matplotlib()
    source = output / "performance.json"
    if not render_only:
        measured = _measure_everything(repeats)
        make_directory(output)
        FORMAT.save(source, measured)
    results = FORMAT.load(source)
    with FORMAT.reading(source):
        found = page(results)
        save_figure(draw(bench_chart(results["bench"])), output / BENCH_PICTURE)
    write_bytes(output / "performance.md", render(found).encode())
    click.echo(f"{output / 'performance.md'}")


def _measure_everything(repeats: int) -> dict[str, Any]:
    from dataclasses import asdict

    from blockcache.compare.bench import run_bench
    from blockcache.models.dpt.policy import Shape
    from blockcache.models.registry import port_of
    from blockcache_lab.studies.scaling import calibration, compare_shapes, footprint, printed_for

    shape = Shape()
    click.echo("1/4 benchmark")
    port = port_of(shape.policy())
    seen = port.synthetic_observations(1)
    bench = run_bench(port, printed_for(shape), seen, asdict(shape), threads=cores(), repeats=repeats).to_dict()
    for row in bench["rows"]:
        del row["samples_ms"]
    click.echo("2/4 other shapes")
    shapes = compare_shapes(cores(), repeats=7)
    click.echo("3/4 memory and long runs")
    feet = {
        "8 x 256, T = 10": footprint(shape, calls=300, generations=1000),
        "8 x 256, T = 10, large pages": footprint(shape, calls=300, generations=1000, large_pages=True),
        "8 x 768, T = 16": footprint(Shape(width=768, horizon=16), calls=30, generations=20),
    }
    click.echo("4/4 calibration")
    return {"bench": bench, "shapes": shapes, "footprint": feet, "calibration": calibration(shape)}


@click.command()
@arg.policy_argument(required=False)
@click.option(
    "--shift", "shifts", multiple=True, help="A change of the task by its name; may be repeated. Default: all."
)
@click.option("--rollouts", type=arg.COUNT, default=50, help="Episodes of each cell.")
@arg.tuned_option
@arg.observations_option
@click.option("--records", type=arg.OUTPUT_DIRECTORY, default="guard", help="A file for each shift is kept here.")
@click.option("--page", "place", type=arg.OUTPUT, metavar="FILE.md", help="Write the page of all that is kept.")
def guard(
    policy: arg.PolicySource | None,
    shifts: tuple[str, ...],
    rollouts: int,
    tuned: Path | None,
    observations: str | None,
    records: Path,
    place: str | None,
) -> None:
    """What the guard of a Push-T POLICY notices when the task is changed, and whether full precision helps then.

    \b
    Examples:
      blockcache paper guard pusht --tuned pusht/tuned --rollouts 50
      blockcache paper guard pusht --shift stale --shift none
      blockcache paper guard --records docs/generated/records/guard-pusht --page docs/generated/guard.md
    """
    from blockcache.report.markdown import render
    from blockcache.report.terminal import display
    from blockcache_lab.pages.guard import FORMAT, page
    from blockcache_lab.studies.guard import SHIFTS, guard_study, other_tasks

    if odd := [name for name in shifts if name not in SHIFTS]:
        raise click.UsageError(f"unknown shift {odd[0]!r}, known are {', '.join(SHIFTS)}")
    if policy is not None:
        import torch

        from blockcache.models.policy_files import OBSERVATIONS, policy_directory
        from blockcache.observations import load_observations

        torch.set_num_threads(1)
        seen = policy.observations(observations)
        make_directory(records)
        for name in shifts or SHIFTS:
            found = guard_study(policy.port, seen, tuned, name, command=arg.typed(), rollouts=rollouts)
            if name == "none":
                known = {one: load_observations(policy_directory(one) / OBSERVATIONS) for one in ALIKE}
                found["others"] = other_tasks(known)
            FORMAT.save(records / f"{name}.json", found)
    files = [FORMAT.load(path) for path in sorted(records.glob("*.json*"))]
    if not files:
        raise click.UsageError(f"there are no records in {records}; name a POLICY")
    shown = page(files)
    if place:
        write_bytes(place, render(shown).encode())
    display(shown)


@click.command()
@click.argument("schedules", nargs=-1)
@click.option("--policy", type=arg.POLICY, help="Take the shape from this policy.")
@click.option("--width", type=arg.SIZE, default=256)
@click.option("--layers", type=arg.LAYERS, default=8)
@click.option("--tokens", type=arg.SIZE, default=10, help="Action tokens (the horizon).")
@click.option("--cond-tokens", type=arg.SIZE, default=3, help="Condition tokens: the time and the observation steps.")
@click.option("--cond-dim", type=click.IntRange(0, 100_000), default=66, help="Numbers per observation step.")
@click.option("--action-dim", type=arg.SIZE, default=2)
@click.option("--steps", type=arg.SIZE, default=100, help="Denoising steps.")
def flops(schedules: tuple[str, ...], policy: arg.PolicySource | None, steps: int, **sizes: int) -> None:
    """FLOPs of one generation, in full and under each of the SCHEDULES (files or names of the paper's).

    By formula: 2 x multiply-adds, attention products included, batch 1. The default shape is the paper's.

    \b
    Examples:
      blockcache paper flops square_ph pusht kitchen
      blockcache paper flops schedule.json --policy pusht
      blockcache paper flops --width 768 --tokens 16
    """
    if policy is not None:
        arg.refuse_sizes_beside_a_policy({"steps", *sizes})
    loaded = {name: arg.load_schedule(name) for name in schedules}

    from blockcache.models.flops import DPTShape
    from blockcache.report.terminal import display
    from blockcache.schedule import generation_flops
    from blockcache_lab.pages.performance import flops_table

    if policy is not None:
        port = policy.port
        blocks, every_step, steps = port.adapter.blocks, port.adapter.every_step, len(port.timesteps)
    else:
        action = sizes.pop("action_dim")
        shape = DPTShape(**sizes, input_dim=action, output_dim=action)
        blocks, every_step = shape.blocks, shape.every_step
    costs = {
        name: (generation_flops(blocks, every_step, steps, item), item.reused_share) for name, item in loaded.items()
    }
    display(flops_table(generation_flops(blocks, every_step, steps), costs))
