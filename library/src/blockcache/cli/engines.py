"""The verbs around engines: export, bench."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.files import exists, write_bytes
from blockcache.models.policy_files import in_directory, policy_directory
from blockcache.samplers import sampler_names
from blockcache_runtime.atomic import make_directory
from blockcache_runtime.cores import cores

if TYPE_CHECKING:
    from blockcache.models.port import Port


@click.command()
@arg.policy_argument()
@click.argument("schedule", required=False)
@click.option("-o", "--output", type=arg.OUTPUT, default="policy.onnx", help="The file to write.")
@click.option("--card", type=arg.OUTPUT_DIRECTORY, metavar="DIR", help="Write policy.onnx and a model card there.")
@click.option("--manifest", type=click.Choice(["physicalai"]), help="With --card: that project's package instead.")
@click.option("--license", "licence", default="unknown", help="On the card: its identifier on the hub, such as mit.")
@click.option("--actions-only", is_flag=True, help="Leave out what the robot does not execute (causal policies).")
@click.option("--other-weights", is_flag=True, help="Accept a schedule that was made for other weights.")
@click.option("--fixed", metavar="FILE.npz", help="Inputs that become constants, such as the token ids of one task.")
@click.option("--rtc", is_flag=True, help="Take the chunk before as inputs, for the new one to go on from it.")
@click.option(
    "--with-reference",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Also write the policy's own answers to N inputs.",
)
@click.option(
    "--guard",
    type=click.Choice(["count", "warn", "full"]),
    help="Have the file notice observations unlike --observations: count them, warn too, or answer in full precision too.",
)
@click.option("--lerobot", type=arg.NEW_DIRECTORY, metavar="OUT", help="Write a directory for LeRobot's own commands.")
@arg.observations_option
@arg.sampler_file_option
@arg.tuned_option
def export(
    policy: arg.PolicySource,
    schedule: str | None,
    output: str,
    card: Path | None,
    manifest: str | None,
    licence: str,
    actions_only: bool,
    other_weights: bool,
    fixed: str | None,
    rtc: bool,
    with_reference: int | None,
    guard: str | None,
    lerobot: Path | None,
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
    --lerobot writes that file, processors, the text encoder and how its actions compare with the original's as a directory
    for --policy.path of lerobot-eval and its like, beside which lerobot_policy_blockcache is installed.

    \b
    Examples:
      blockcache export lerobot_dir/ --tuned lerobot_dir/tuned --lerobot fast_dir/
      blockcache export lerobot_dir/ --fixed task.npz -o task.onnx
      blockcache export pusht schedule.json -o pusht.onnx
      blockcache export pusht schedule.json --actions-only -o fast.onnx
      blockcache export my_module:make_policy -o full.onnx
      blockcache export my_module:make_policy --tuned tuned/ -o fast.onnx
      blockcache export pusht --sampler-file fitted.json -o fitted.onnx
      blockcache export pusht schedule.json --rtc -o asynchronous.onnx
      blockcache export pusht --guard warn -o guarded.onnx
      blockcache export pusht --tuned pusht/tuned --guard full -o guarded.onnx
      blockcache export pusht/tuned --card handover/ --with-reference 16 --license mit
      blockcache export pusht/tuned --card package/ --manifest physicalai
    """
    if manifest and (card is None or rtc or with_reference or guard):
        raise click.UsageError("--manifest needs --card DIR, and leaves out --rtc, --with-reference and --guard")
    if tuned is not None and (schedule or sampler_file):
        raise click.UsageError("--tuned brings its own schedule and sampler; leave out SCHEDULE and --sampler-file")
    apart = ["output", "card", "manifest", "actions_only", "rtc", "with_reference", "guard"]
    if lerobot is not None and (other := arg.given(apart)):
        raise click.UsageError(
            f"--lerobot writes what LeRobot needs, real-time chunking and a card too; leave out {', '.join(other)}"
        )
    if card is not None and arg.given(["output"]):
        raise click.UsageError("--card DIR writes policy.onnx there; leave out --output")
    followed = arg.load_schedule(schedule) if schedule else None if tuned else policy.schedule()

    from blockcache.engines import export_policy
    from blockcache.observations import load_observations

    if card is not None:
        make_directory(card)
        output = str(card / "policy.onnx")
    kind, check = "action" if actions_only else "chunk", "shape" if other_weights else "strict"
    constants = load_observations(fixed) if fixed else None
    port = policy.port_with(sampler_file)
    if lerobot is not None:
        from blockcache.cli.lerobot import write_directory

        seen = policy.known_observations(observations)
        notes, own, first = write_directory(
            lerobot, port, policy.port, followed, check, constants, tuned, seen, licence=licence
        )
        click.echo(f"{lerobot}: the file {own}")
        click.echo(f"beside the original: actions differ by {first.largest:.1e} at most, {first.typical:.1e} typically")
        for note in notes:
            click.echo(f"note: {note}")
        click.echo(f"run it: lerobot-eval --policy.path={lerobot} --env.type=...")
        return
    known = policy.observations(observations) if guard else None
    notes = export_policy(
        port, followed, output, kind, check, rtc=rtc, fixed=constants, tuned=tuned, guard=guard, observations=known
    )
    click.echo(f"{output}: {os.path.getsize(output) / 1e6:.1f} MB")
    if with_reference:
        from blockcache.compare.parity import save_reference
        from blockcache.engines.build import tuned_port

        port = port if tuned is None else tuned_port(tuned, port)[0]
        place = save_reference(output, port, policy.known_observations(observations), with_reference)
        click.echo(f"{place}: on the robot, python -m blockcache_runtime check {output} --reference {place}")
    if card is not None:
        _write_card(policy, output, card, manifest, licence, tuned)
    for note in notes:
        click.echo(f"note: {note}")


def _write_card(
    policy: arg.PolicySource, output: str, card: Path, manifest: str | None, licence: str, tuned: Path | None
) -> None:
    """README.md beside an export; with a manifest, the package takes the export's place."""
    from blockcache.models.policy_files import TUNING
    from blockcache.report.card import PHYSICALAI, RUNTIME, export_card
    from blockcache.results.tuning import Tuning
    from blockcache_runtime import ExportedPolicy
    from blockcache_runtime.parity import Reference, compare, reference_path

    opened, place = ExportedPolicy(output, 1), reference_path(output)
    moments = (opened.n_obs_steps, *([sorted(opened.timeless)] if opened.timeless else []))
    beside = tuned or (policy_directory(policy.name) if in_directory(policy.name) else None)
    found = Tuning.load(beside / TUNING) if beside is not None and exists(beside / TUNING) else None
    parity = compare(opened, Reference.load(place)) if place.exists() and not manifest else None
    how, inputs = RUNTIME.format(moments=", ".join(map(repr, moments))), opened.inputs
    if manifest:
        from blockcache.engines.physicalai import write_package

        name = re.sub(r"[^A-Za-z0-9_-]+", "-", policy.name).strip("-_") or "policy"
        files = write_package(output, card, name)
        for written in files:
            click.echo(f"{written}")
        os.unlink(output)
        features = [item["init_args"] for item in json.loads(files[0].read_text())["model"]["input_features"]]
        how, inputs = PHYSICALAI, {item["name"]: tuple(item["shape"]) for item in features}
    text = export_card(policy.name, opened.header, inputs, how, found, parity, licence)
    write_bytes(card / "README.md", text.encode())
    click.echo(f"{card / 'README.md'}: the model card")


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
        FORMAT.save(json_path, {**figures, "command": arg.typed()})
    if plot:
        save_figure(draw(bench_chart(figures)), plot)
    summary = {row.name: {"p50_ms": round(row.p50_ms, 3), "speedup": round(row.speedup, 2)} for row in result.rows}
    click.echo(json.dumps(summary))


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
