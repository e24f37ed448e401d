"""The verb `tune`: the best sampler, schedule and number of threads for a policy on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import STARTED
from blockcache.cli import arguments as arg
from blockcache.models.policy_files import TUNING

if TYPE_CHECKING:
    from blockcache.compare.tuned import Tuned


def _milliseconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*(ms|s)?", text, re.ASCII)
    if found is None or not float(found[1]):
        raise click.BadParameter(f"a deadline is a time above 0, such as 25ms or 0.025s, got {text!r}")
    if found[2] is None:
        raise click.BadParameter(f"a deadline needs its unit: {text}ms or {text}s?")
    return float(found[1]) * (1e3 if found[2] == "s" else 1)


TIME = arg.CheckedText("time", _milliseconds)


@click.command()
@arg.policy_argument()
@click.option("--deadline", type=TIME, help="For one chunk, such as 25ms: the least loss within it.")
@click.option("--loss", type=click.FloatRange(0.001, 1.0), help="Of the score that may be lost: the fastest within it.")
@click.option("-o", "--output", type=arg.OUTPUT_DIRECTORY, default="tuned", help="The tuned policy, a new directory.")
@arg.observations_option
@click.option("--task", type=arg.TASK, help="Roll out the best few on it, and the winner again on fresh seeds.")
@click.option("--rollouts", type=arg.COUNT, default=200, help="With --task: pairs on tuning seeds, and on fresh ones.")
@click.option(
    "--minutes", type=click.FloatRange(0.1, 10_000), default=10.0, help="For all but rollouts. More go on from here."
)
@click.option(
    "--rate",
    "rate_hz",
    type=click.FloatRange(0.1, 1000),
    default=10.0,
    help="In Hz: how often a control loop asks for a chunk.",
)
@click.option("--keep-sampler", is_flag=True, help="Only schedules, under the policy's own sampler.")
@click.option("--keep-spread", is_flag=True, help="Only what keeps the spread of the policy's own actions.")
@click.option("--seed", type=arg.SEED, default=0, help="Of the noise and the split of the observations.")
@arg.engine_option
@click.option("--workers", type=arg.CORES, help="With --task: processes on this machine. Default: one for each core.")
@click.option("--plot", type=arg.OUTPUT, help="Draw loss against milliseconds (.png, .svg or .pdf).")
def tune(
    policy: arg.PolicySource,
    deadline: float | None,
    loss: float | None,
    output: Path,
    observations: str | None,
    workers: int | None,
    plot: str | None,
    **settings: Any,
) -> None:
    """Find the best sampler, steps, schedule and number of threads for POLICY on this machine: for a deadline, or a loss.

    What is finished is kept beside the output: interrupted or killed, the same command goes on from there, also with more
    --minutes. The output is a policy directory with its schedule and the evidence (tuning.json); `export` takes it as it is.

    \b
    Examples:
      blockcache tune pusht --loss 0.03
      blockcache tune pusht --deadline 4ms --task pusht --rollouts 200 -o fast/
      blockcache tune my_module:make_policy --deadline 25ms --observations obs.npz --keep-sampler
    """
    if (deadline is None) == (loss is None):
        raise click.UsageError("name what is wanted: either --deadline, such as 25ms, or --loss, such as 0.03")
    state = output.with_name(f"{output.name}.state")
    if output.exists() and not ((output / TUNING).is_file() and state.is_dir()):
        raise click.UsageError(f"{output} is there already, and no tuning to go on with; name a new directory with -o")
    if plot is not None:
        from blockcache.report.drawing import require_matplotlib

        require_matplotlib()
    seen = policy.observations(observations)

    from blockcache.compare.tuner import tune as run
    from blockcache.report.terminal import display
    from blockcache.report.tuning import tuning_blocks, tuning_chart

    with arg.resumable(state):
        found = run(
            policy.port,
            seen,
            deadline_ms=deadline,
            loss=loss,
            state=state,
            source=str(policy),
            command=arg.typed(),
            started=STARTED,
            backend=arg.chosen_backend(workers, None),
            **settings,
        )
    display(*tuning_blocks(found.tuning))
    click.echo()
    for line in _written(policy, found, output):
        click.echo(line)
    if plot is not None:
        from blockcache.report.drawing import draw, save_figure

        save_figure(draw(tuning_chart(found.tuning, named=True)), plot)
        click.echo(f"drawn in {plot}")


def _written(policy: arg.PolicySource, found: Tuned, output: Path) -> list[str]:
    """Write the directory, and say how to go on from there."""
    from blockcache.compare.tuned import save_tuned

    whole, count = save_tuned(policy.port, found, output), found.replan
    own = "" if whole else f"; your own policy needs n_action_steps = {count} before it is accelerated or exported"
    replans = [] if count is None else [f"execute {count} actions of each chunk: Player(..., replan={count}){own}"]
    if whole:
        return [f"written to {output}; a file for the robot: blockcache export {output} -o policy.onnx", *replans]
    return [
        f"written to {output}, without the policy itself, which only your own code can save",
        f"a file for the robot: blockcache export {policy} --tuned {output} -o policy.onnx",
        *replans,
    ]
