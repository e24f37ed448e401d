"""The verbs around engines: export, bench."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.samplers import sampler_names
from blockcache_runtime.cores import cores

if TYPE_CHECKING:
    from blockcache.models.port import Port


@click.command()
@arg.policy_argument()
@click.argument("schedule", required=False)
@click.option("-o", "--output", type=arg.OUTPUT, default="policy.onnx", help="The file to write.")
@click.option("--actions-only", is_flag=True, help="Leave out what the robot does not execute (causal policies).")
@click.option("--other-weights", is_flag=True, help="Accept a schedule that was made for other weights.")
@click.option(
    "--fixed", metavar="FILE.npz", help="Inputs that never change, such as the token ids of one task: become constants."
)
@click.option("--rtc", is_flag=True, help="Take the chunk before as inputs, for the new one to go on from it.")
@click.option(
    "--with-reference",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Also write the policy's own answers to N observations, to compare with on the robot.",
)
@arg.observations_option
@arg.sampler_file_option
@arg.tuned_option
def export(
    policy: arg.PolicySource,
    schedule: str | None,
    output: str,
    actions_only: bool,
    other_weights: bool,
    fixed: str | None,
    rtc: bool,
    with_reference: int | None,
    observations: str | None,
    sampler_file: str | None,
    tuned: Path | None,
) -> None:
    """Write POLICY under SCHEDULE as one ONNX file: observation and noise in, actions in robot units out.

    SCHEDULE is a file, or one of the paper's by name; without it, the one in the policy's directory where `tune` wrote one,
    or else full precision. The file needs no Python, no cache
    and no policy code to run; blockcache_runtime (docs/on-a-robot.md) runs it with numpy and onnxruntime alone.
    A LeRobot directory becomes a file with its vision encoder; the words of its task are constants with --fixed, and without
    it the file takes what the text encoder makes of them.

    \b
    Examples:
      blockcache export lerobot_dir/ --fixed task.npz -o task.onnx
      blockcache export pusht schedule.json -o pusht.onnx
      blockcache export pusht schedule.json --actions-only -o fast.onnx
      blockcache export my_module:make_policy -o full.onnx
      blockcache export my_module:make_policy --tuned tuned/ -o fast.onnx
      blockcache export pusht --sampler-file fitted.json -o fitted.onnx
      blockcache export pusht schedule.json --rtc -o asynchronous.onnx
    """
    if tuned is not None and (schedule or sampler_file):
        raise click.UsageError("--tuned brings its own schedule and sampler; leave out SCHEDULE and --sampler-file")
    followed = arg.load_schedule(schedule) if schedule else None if tuned else policy.schedule()

    from blockcache.engines import export_policy
    from blockcache.observations import load_observations

    kind, check = "action" if actions_only else "chunk", "shape" if other_weights else "strict"
    constants = load_observations(fixed) if fixed else None
    port = policy.port_with(sampler_file)
    notes = export_policy(port, followed, output, kind, check, rtc=rtc, fixed=constants, tuned=tuned)
    click.echo(f"{output}: {os.path.getsize(output) / 1e6:.1f} MB")
    if with_reference:
        from blockcache.compare.parity import save_reference
        from blockcache.engines.tuned import tuned_port

        port = port if tuned is None else tuned_port(tuned, port)[0]
        place = save_reference(output, port, policy.known_observations(observations), with_reference)
        click.echo(f"{place}: on the robot, python -m blockcache_runtime check {output} --reference {place}")
    for note in notes:
        click.echo(f"note: {note}")


@click.command()
@arg.policy_argument(required=False)
@click.option("--schedule", help="A schedule file or a printed one. Default: the paper's square_ph, stretched to fit.")
@arg.tuned_option
@click.option("--width", type=arg.SIZE, default=256)
@click.option("--layers", type=arg.LAYERS, default=8)
@click.option("--horizon", type=arg.SIZE, default=10)
@click.option("--sampler", type=click.Choice(sampler_names()), default="ddpm")
@click.option("--steps", type=arg.SIZE, default=100, help="Denoising steps.")
@click.option("--batch", type=arg.SIZE, default=1)
@click.option("--cameras", type=click.IntRange(0, 16), default=0, help="Each of 96 x 96 pixels, through a ResNet18.")
@click.option("--threads", type=arg.CORES, help="Measure with 1 and this many threads. Default: all cores.")
@click.option("--repeats", type=click.IntRange(2, arg.MOST), default=20, help="Interleaved rounds.")
@click.option("--quick", is_flag=True, help="Engines only, and 5 rounds unless --repeats says otherwise.")
@click.option("--json", "json_path", type=arg.OUTPUT, help="Write all figures here.")
@click.option("--plot", type=arg.OUTPUT, metavar="FILE.png", help="Draw the table.")
def bench(
    policy: arg.PolicySource | None,
    schedule: str | None,
    tuned: Path | None,
    threads: int | None,
    repeats: int,
    quick: bool,
    json_path: str | None,
    plot: str | None,
    **sizes: Any,
) -> None:
    """Time every engine beside what users run today, all in one interleaved run.

    Without a POLICY it is a DP-T of the given sizes with random weights: speed does not depend on them. What a policy or
    this machine does not allow is named with the reason. Leave the machine alone while it runs. The last line is a summary
    as JSON.

    \b
    Examples:
      blockcache bench
      blockcache bench pusht --schedule schedule.json
      blockcache bench my_module:make_policy --quick
      blockcache bench my_module:make_policy --tuned tuned/
      blockcache bench --cameras 1
      blockcache bench --width 768 --horizon 16 --threads 2 --json bench.json --plot bench.png
    """
    from blockcache.report.drawing import require_matplotlib

    if plot:
        require_matplotlib()
    if policy:
        arg.refuse_sizes_beside_a_policy(set(sizes) - {"batch"})
    if tuned and (schedule or not policy):
        raise click.UsageError("--tuned needs a POLICY, and brings its schedule; leave out --schedule")
    followed = arg.load_schedule(schedule) if schedule else None

    import torch

    from blockcache.compare.bench import run_bench
    from blockcache.models.dpt.policy import CAMERA_FEATURES, Shape
    from blockcache.models.registry import port_of
    from blockcache.report.bench import bench_chart, bench_table, encoder_ceilings, not_available
    from blockcache.report.drawing import draw, save_figure
    from blockcache.report.terminal import display
    from blockcache.results.bench import FORMAT
    from blockcache.solvers.presets import stretched_schedule

    shape = Shape(**sizes, obs_dim=max(Shape.obs_dim, CAMERA_FEATURES * sizes["cameras"] + 2))
    port = policy.port if policy else port_of(shape.policy())
    if policy and tuned:
        port, followed = policy.tuned(tuned)
    elif followed is None:
        followed = stretched_schedule("square_ph", port.adapter.blocks, len(port.timesteps))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seen = port.synthetic_observations(shape.batch)
    result = run_bench(
        port,
        followed,
        seen,
        _sizes(port, shape.batch) if policy else asdict(shape),
        threads=threads or cores(),
        repeats=5 if quick and not arg.given(["repeats"]) else repeats,
        quick=quick,
        named="tuned" if tuned else "BAC",
    )
    figures = result.to_dict()
    display(bench_table(figures["rows"]), encoder_ceilings(figures), not_available(figures))
    if json_path:
        FORMAT.save(json_path, figures)
    if plot:
        save_figure(draw(bench_chart(figures)), plot)
    click.echo(
        json.dumps(
            {row.name: {"p50_ms": round(row.p50_ms, 3), "speedup": round(row.speedup, 2)} for row in result.rows}
        )
    )


def _sizes(port: Port, batch: int) -> dict[str, Any]:
    """A policy's sizes, for the record, by the names that random weights are asked for with."""
    return {
        "family": port.adapter.family,
        "layers": len(port.adapter.layers),
        **port.adapter.widths,
        "horizon": port.horizon,
        "n_obs_steps": port.n_obs_steps,
        "n_action_steps": port.n_action_steps,
        "obs_dim": port.inputs.get("obs", (0,))[-1],
        "action_dim": len(port.action_scale),
        "sampler": port.sampling.settings["type"],
        "steps": len(port.timesteps),
        "batch": batch,
    }
