"""The verbs around schedules: calibrate, solve, show, flops."""

from __future__ import annotations

from typing import Any

import click

from blockcache.cli.arguments import (
    load_observations,
    load_schedule,
    refuse_sizes_beside_a_policy,
    threads_option,
    typed,
)
from blockcache.files import check_writable

_SIZE = click.IntRange(min=1)


@click.command()
@click.argument("policy")
@click.option(
    "-o", "--output", default="recording.safetensors", show_default=True, help="Where to write the recording."
)
@click.option(
    "--observations", metavar="FILE", help="A .npz with an array 'obs' (N, n_obs, obs). Default: the policy's own."
)
@click.option(
    "--generations", type=click.IntRange(min=1), default=16, show_default=True, help="Observations to use, at most."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the noise.")
@threads_option
def calibrate(policy: str, output: str, observations: str | None, generations: int, seed: int, threads: int) -> None:
    """Run POLICY in full and record how each block's output changes over the denoising steps.

    POLICY is a policy directory or the name of a shipped one.

    \b
    Examples:
      blockcache calibrate pusht
      blockcache calibrate my_policy/ --observations obs.npz --generations 32 -o my_recording.safetensors
    """
    check_writable(output)

    import torch

    from blockcache.attach.recorder import calibrate as record
    from blockcache.models.dpt import load_policy

    torch.set_num_threads(threads)
    loaded = load_policy(policy)
    batches = load_observations(loaded, policy, observations)[:generations]
    recording = record(loaded, [batch[None] for batch in batches], seed=seed)
    recording.save(output)
    click.echo(
        f"{output}: {len(recording.blocks)} blocks x {recording.steps} steps from {recording.generations} generations "
        f"in {recording.origin['seconds']:.1f} s"
    )


@click.command()
@click.argument("recording")
@click.option("-o", "--output", default="schedule.json", show_default=True, help="Where to write the schedule.")
@click.option("-S", "--updates", default=10, show_default=True, help="Update steps per block, step 0 among them.")
@click.option("-n", "--union", default=5, show_default=True, help="Blocks that the bubbling union repairs.")
@click.option("--metric", default="cosine", show_default=True, help="cosine, mse, l1 or wasserstein.")
@click.option("--method", default="bac", show_default=True, help="bac, blockwise, unified or uniform.")
@click.option("--objective", default="anchor", show_default=True, help="anchor, or consecutive as the paper prints it.")
def solve(recording: str, output: str, updates: int, union: int, metric: str, method: str, objective: str) -> None:
    """Solve a RECORDING for the steps at which each block is computed.

    \b
    Examples:
      blockcache solve recording.safetensors
      blockcache solve recording.safetensors --updates 20 --union 5 -o safe.json
      blockcache solve recording.safetensors --method uniform -o uniform.json
    """
    check_writable(output)

    from blockcache.solvers import solve as run_solver
    from blockcache.solvers.recording import Recording

    schedule = run_solver(Recording.load(recording), updates, union, metric, method, objective)
    schedule.save(output)
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
    from blockcache.cli.pictures import schedule_picture
    from blockcache.schedule.plan import compile_plan

    loaded = load_schedule(schedule)
    click.echo(compile_plan(loaded).describe() if plan else schedule_picture(loaded))


@click.command()
@click.argument("policy")
@click.option("-o", "--output", default="docs", show_default=True, help="Directory for caching-error.json and .md.")
@click.option("--observations", metavar="FILE", help="A .npz with an array 'obs'. Default: the policy's own.")
@click.option("--generations", type=click.IntRange(min=1), default=16, show_default=True, help="To calibrate on.")
@threads_option
def errors(policy: str, output: str, observations: str | None, generations: int, threads: int) -> None:
    """Caching error per block and action error of POLICY under every method at S = 5, 10 and 20.

    \b
    Example:
      blockcache errors pusht -o docs
    """
    check_writable(output, directory=True)

    from pathlib import Path

    import torch

    from blockcache.files import make_directory, write_bytes
    from blockcache.models.dpt import load_policy
    from blockcache.report.caching import page
    from blockcache.report.markdown import render
    from blockcache.report.terminal import display
    from blockcache.studies.caching import FORMAT, caching_study

    torch.set_num_threads(threads)
    loaded = load_policy(policy)
    seen = load_observations(loaded, policy, observations)
    results = caching_study(loaded, seen, generations=generations, command=typed())
    make_directory(output)
    FORMAT.save(Path(output) / "caching-error.json", results)
    write_bytes(Path(output) / "caching-error.md", render(page(results)).encode())
    display(page(results))


@click.command()
@click.argument("schedules", nargs=-1)
@click.option("--policy", help="Take the shape from this policy (directory or shipped name).")
@click.option("--width", type=_SIZE, default=256, show_default=True)
@click.option("--layers", type=_SIZE, default=8, show_default=True)
@click.option("--tokens", type=_SIZE, default=10, show_default=True, help="Action tokens (the horizon).")
@click.option(
    "--cond-tokens", default=3, show_default=True, help="Condition tokens: the time and the observation steps."
)
@click.option("--cond-dim", default=66, show_default=True, help="Numbers per observation step.")
@click.option("--action-dim", type=_SIZE, default=2, show_default=True)
@click.option("--steps", type=_SIZE, default=100, show_default=True, help="Denoising steps.")
def flops(schedules: tuple[str, ...], policy: str | None, steps: int, **sizes: int) -> None:
    """FLOPs of one generation, in full and under each of the SCHEDULES (files or names of the paper's).

    By formula: 2 x multiply-adds, attention products included, batch 1. The default shape is the paper's.

    \b
    Examples:
      blockcache flops square_ph pusht kitchen
      blockcache flops schedule.json --policy pusht
      blockcache flops --width 768 --tokens 16
    """
    from blockcache.report.performance import flops_table
    from blockcache.report.terminal import display
    from blockcache.schedule.cost import generation

    blocks, every_step, steps = _shape(policy, steps, sizes)
    loaded = {name: load_schedule(name) for name in schedules}
    costs = {name: (generation(blocks, every_step, steps, item), item.reused_share) for name, item in loaded.items()}
    display(flops_table(generation(blocks, every_step, steps), costs))


def _shape(policy: str | None, steps: int, sizes: dict[str, int]) -> tuple[Any, int, int]:
    if policy is not None:
        from blockcache.models.dpt import load_policy
        from blockcache.models.port import examine

        refuse_sizes_beside_a_policy({"steps", *sizes})
        target = examine(load_policy(policy))
        return target.adapter.blocks, target.adapter.every_step, len(target.timesteps)
    from blockcache.models.dpt.flops import DPTShape

    action = sizes.pop("action_dim")
    shape = DPTShape(**sizes, input_dim=action, output_dim=action)
    return shape.blocks, shape.every_step, steps


COMMANDS = (calibrate, solve, show, flops, errors)
