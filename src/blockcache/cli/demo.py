"""The verb `demo`: the whole flow on the policy that ships with the package, in a few minutes."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import click

from blockcache.cli.arguments import load_observations
from blockcache.errors import ObservationError, TaskError

if TYPE_CHECKING:
    from torch import Tensor

    from blockcache.compare.candidates import Calibrations
    from blockcache.models.dpt import DiffusionTransformerPolicy


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

    from blockcache.compare.candidates import Calibrations
    from blockcache.models.dpt import load_policy

    torch.set_num_threads(threads)
    policy = load_policy(source)
    config = policy.config
    click.echo(
        f"{source}: {config.n_layer} layers x {config.n_emb}, {policy.num_inference_steps} "
        f"{policy.sampler.type.upper()} steps, {sum(p.numel() for p in policy.model.parameters()) / 1e6:.2f} M parameters"
    )
    observations = load_observations(policy, source, None)
    if len(observations) <= generations:
        raise ObservationError(
            f"the policy brings {len(observations)} observations; {generations} to calibrate on leave none to compare on"
        )
    with tempfile.TemporaryDirectory() as kept:  # one calibration for both comparisons
        _open_loop(Calibrations(policy, observations[:generations], keep=kept), observations, repeats)
        if seconds:
            _closed_loop(policy, source, observations, generations, seconds, kept)


def _open_loop(calibrations: Calibrations, observations: Tensor, repeats: int) -> None:
    import torch

    from blockcache.compare.methods import parse_method
    from blockcache.report.evaluation import open_loop_blocks
    from blockcache.report.terminal import display
    from blockcache.studies.tradeoff import tradeoff

    policy, generations, threads = calibrations.policy, len(calibrations.observations), torch.get_num_threads()
    recording = calibrations.recording(policy.sampler)
    click.echo(f"calibrated on {recording.generations} generations in {recording.origin['seconds']:.0f} s\n")
    methods = {
        "DDIM, 16 steps": calibrations.candidate(parse_method("ddim-16"), engine=None),
        "Uniform, S = 10": calibrations.candidate(parse_method("uniform:S=10"), "patched"),
        "BAC, S = 10, n = 5": calibrations.candidate(parse_method("bac:S=10,n=5"), "patched"),
        "BAC, S = 10, n = 5 ": calibrations.candidate(parse_method("bac:S=10,n=5")),
        "BAC, S = 20, n = 5 ": calibrations.candidate(parse_method("bac:S=20,n=5")),
        "full precision ": calibrations.candidate(parse_method("full")),
    }
    result = tradeoff(policy, methods, observations[generations : generations + 32], repeats=repeats)
    display(*open_loop_blocks(result, repeats, threads))


def _closed_loop(
    policy: DiffusionTransformerPolicy,
    source: str,
    observations: Tensor,
    generations: int,
    seconds: int,
    kept: str,
) -> None:
    from blockcache.compare.jobs import local_workers
    from blockcache.report.evaluation import closed_loop_blocks
    from blockcache.report.stored import shipped
    from blockcache.report.terminal import display
    from blockcache.studies.showcase import showcase
    from blockcache.tasks import make_task

    try:
        if policy.config.task is None:
            raise TaskError("the policy does not say which task it was trained for")
        make_task(policy.config.task).close()  # a missing simulator shows now
        click.echo(f"\nNow in the simulator, for about {seconds} s:")
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
        click.echo(f"\nNo rollouts here: {error}.")
        return
    stored = shipped()
    weights = found.results.policy["fingerprint"]["weights"]
    fits = stored is not None and (stored.task, stored.weights) == (found.results.task["name"], weights)
    click.echo()
    display(*closed_loop_blocks(found.results, found.speed, stored if fits else None))


COMMANDS = (demo,)
