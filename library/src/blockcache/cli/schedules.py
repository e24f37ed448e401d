"""The verbs around schedules: calibrate, solve, show, and the picture that `show` prints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.solvers import METHODS, OBJECTIVES
from blockcache.solvers.recording import METRICS

if TYPE_CHECKING:
    from blockcache.schedule import Schedule

COLUMNS = 100  # of the picture, at most


@click.command()
@arg.policy_argument()
@click.option("-o", "--output", type=arg.OUTPUT, default="recording.safetensors", help="The recording.")
@arg.observations_option
@arg.generations_option
@arg.sampler_file_option
@click.option("--seed", type=arg.SEED, default=0, help="Of the noise.")
@click.option("--action-costs", is_flag=True, help="What reuse does to the executed action, too: for --method action.")
@arg.threads_option
def calibrate(
    policy: arg.PolicySource,
    output: str,
    observations: str | None,
    generations: int,
    sampler_file: str | None,
    seed: int,
    action_costs: bool,
    threads: int,
) -> None:
    """Run POLICY in full and record how each block's output changes over the denoising steps.

    \b
    Examples:
      blockcache calibrate pusht
      blockcache calibrate my_policy/ --observations obs.npz --generations 32 -o my_recording.safetensors
      blockcache calibrate my_module:make_policy --observations obs.npz
      blockcache calibrate pusht --action-costs
    """
    seen = policy.observations(observations)

    import torch

    from blockcache.attach.recorder import calibrate as record
    from blockcache.observations import parts, rows

    torch.set_num_threads(threads)
    port = policy.port_with(sampler_file)
    batches = [port.prepare_observation(one) for one in parts(rows(seen, 0, generations), 1)]
    recording = record(port, batches, seed=seed, action_costs=action_costs)
    replace(recording, origin={**recording.origin, "command": arg.typed("output")}).save(output)
    click.echo(
        f"{output}: {len(recording.blocks)} blocks x {recording.steps} steps from {recording.generations} generations "
        f"in {recording.origin['seconds']:.1f} s"
    )


@click.command()
@click.argument("recording")
@click.option("-o", "--output", type=arg.OUTPUT, default="schedule.json", help="The schedule.")
@click.option("-S", "--updates", type=arg.COUNT, help="Update steps per block, step 0 among them. Default: 10.")
@click.option("-n", "--union", type=arg.COUNT_OR_0, help="Blocks that the bubbling union repairs. Default: up to 5.")
@click.option(
    "--metric", type=click.Choice([*METRICS]), default="cosine", help="Cosine is the paper's, MSE as a rule better."
)
@click.option("--method", type=click.Choice(METHODS), default="bac")
@click.option("--objective", type=click.Choice(OBJECTIVES), default="anchor")
@click.option("--last", is_flag=True, help="Every block at the last step too, as the authors' released code has it.")
@click.option("--budget", type=float, help="With --method action: the share of the full FLOPs. Default: 0.15.")
@click.option("--flops", type=float, help="With --method action, instead of a budget: FLOPs of one generation.")
def solve(recording: str, output: str, **settings: Any) -> None:
    """Solve a RECORDING for the steps at which each block is computed.

    The objective is the one that the paper's code has; "consecutive" is as the paper prints it. --method action asks
    instead where the executed action needs a block, and takes a recording with action costs.

    \b
    Examples:
      blockcache solve recording.safetensors
      blockcache solve recording.safetensors --updates 20 --union 5 -o safe.json
      blockcache solve recording.safetensors --method uniform -o uniform.json
      blockcache solve recording.safetensors --method action --budget 0.15
    """
    from blockcache.solvers import solve as run_solver
    from blockcache.solvers.recording import Recording

    schedule = run_solver(Recording.load(recording), **settings)
    replace(schedule, origin={**schedule.origin, "command": arg.typed("output")}).save(output)
    click.echo(
        f"{output}: {schedule.computed} of {schedule.steps * len(schedule.blocks)} block computations, "
        f"{schedule.reused_share:.1%} reused"
    )


@click.command()
@click.argument("schedule")
@click.option("--plan", is_flag=True, help="Print the compiled program, step by step, instead of the picture.")
def show(schedule: str, plan: bool) -> None:
    """Draw a SCHEDULE in the terminal: a file, or one of the paper's by name.

    \b
    Examples:
      blockcache show schedule.json
      blockcache show square_ph
      blockcache show square_ph --plan | less
    """
    from blockcache.schedule.plan import compile_plan

    loaded = arg.load_schedule(schedule)
    click.echo(compile_plan(loaded).describe() if plan else schedule_picture(loaded))


def schedule_picture(schedule: Schedule) -> str:
    """Plain text: one row a block with its number of updates behind it, one column a step (or a few steps)."""
    per_column = -(-schedule.steps // COLUMNS)
    columns = -(-schedule.steps // per_column)
    width = max(len(name) for name in schedule.blocks)
    lines = [_title(schedule), "", f"{'':{width}}  {_ruler(columns, per_column)}"]
    for name, steps in schedule.updates.items():
        marked = {step // per_column for step in steps}
        row = "".join("#" if column in marked else "." for column in range(columns))
        lines.append(f"{name:{width}}  {row} {len(steps):4d}")
    computing = [sum(step in steps for steps in schedule.update_sets.values()) for step in range(schedule.steps)]
    idle = computing.count(0)
    lines += [
        "",
        f"# computed, . reused; one column is {per_column} step{'s' if per_column > 1 else ''}, the first step comes first",
        f"{schedule.computed} of {schedule.steps * len(schedule.blocks)} block computations ({schedule.reused_share:.1%} "
        f"reused); {idle} of {schedule.steps} steps compute nothing",
    ]
    return "\n".join(lines)


def _title(schedule: Schedule) -> str:
    origin = schedule.origin
    named = {"updates": "S", "union": "n", "metric": "metric", "source": "from"}
    facts = [f"{label} = {origin[key]}" for key, label in named.items() if key in origin]
    corrected = origin.get("misprints_corrected") or {}
    note = f"; misprint corrected in {', '.join(corrected)}" if corrected else ""
    return f"{origin.get('method', 'schedule')}, K = {schedule.steps}" + "".join(f", {fact}" for fact in facts) + note


def _ruler(columns: int, per_column: int) -> str:
    marks = [" "] * (columns + 6)
    for column in range(0, columns, 10):
        label = str(column * per_column)
        marks[column : column + len(label)] = label
    return "".join(marks).rstrip()
