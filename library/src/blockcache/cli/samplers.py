"""The verbs that choose a sampler of few steps for a policy: `policy place` and `policy fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.compare.parts import SPREAD
from blockcache.samplers import sampler_names

if TYPE_CHECKING:
    from blockcache.samplers import ChosenSampler

count_option = click.option("--count", type=arg.COUNT, default=32, help="Observations to use; a quarter is held back.")
seed_option = click.option("--seed", type=arg.SEED, default=0, help="Of all noise and of what is held back.")
threads_option = click.option("--threads", type=arg.CORES, help="Threads for torch. Default: all cores.")


@click.command()
@arg.policy_argument()
@click.option("-o", "--output", type=arg.OUTPUT, default="placed.json", help="The sampler file to write.")
@click.option("--steps", type=arg.COUNT, default=8)
@click.option("--sampler", type=click.Choice(sampler_names()), default="ddpm")
@arg.observations_option
@count_option
@seed_option
@threads_option
def place(
    policy: arg.PolicySource,
    output: str,
    steps: int,
    sampler: str,
    observations: str | None,
    count: int,
    seed: int,
    threads: int | None,
) -> None:
    """Find where the few steps of a sampler lie best for POLICY: start, end and spacing, then step by step.

    Judged by the energy distance between the actions that it draws and those of the policy's own sampler. The observations
    should come from closed loop, such as 'policy observe' keeps them.

    \b
    Examples:
      blockcache policy place pusht --steps 8 -o placed.json
      blockcache policy place my_policy/ --observations obs.npz --sampler sde-dpmsolver++
      blockcache eval pusht -m sampler:placed.json
    """
    seen = _seen(policy, observations, count, threads)

    from blockcache.fitting import place_steps

    _written(place_steps(policy.port, seen, steps, sampler, seed=seed), output)


@click.command()
@arg.policy_argument()
@click.option("-o", "--output", type=arg.OUTPUT, default="fitted.json", help="The sampler file to write.")
@click.option("--steps", type=arg.COUNT, default=5)
@click.option(
    "--spread",
    type=click.FloatRange(0, 1, min_open=True),
    default=SPREAD,
    help="1 keeps the spread of the policy's actions; less makes them sharper.",
)
@click.option("--start", metavar="FILE", help="A sampler file to start from. Default: DDPM steps, placed first.")
@click.option("--iterations", type=arg.COUNT, default=100)
@arg.observations_option
@count_option
@seed_option
@threads_option
def fit(
    policy: arg.PolicySource,
    output: str,
    steps: int,
    spread: float,
    start: str | None,
    iterations: int,
    observations: str | None,
    count: int,
    seed: int,
    threads: int | None,
) -> None:
    """Fit all constants of a sampler of few steps to POLICY, through the generation. No weight is touched.

    The constants that do best on held-back observations are kept; a fit that does not beat its start is refused. It is
    another sampler and so another distribution of actions: say so where its results stand.

    \b
    Examples:
      blockcache policy fit pusht --steps 5 -o fitted.json
      blockcache policy fit my_policy/ --observations obs.npz --spread 1 --start placed.json
      blockcache eval pusht -m sampler:fitted.json -m sampler:fitted.json+bac:S=3,n=2
    """
    seen = _seen(policy, observations, count, threads)

    from blockcache.fitting import Effort, fit_sampler
    from blockcache.samplers import SamplerConfig

    begun = None if start is None else SamplerConfig.load(start)
    found = fit_sampler(policy.port, seen, steps, spread, start=begun, effort=Effort(iterations), seed=seed)
    _written(found, output)


def _seen(policy: arg.PolicySource, observations: str | None, count: int, threads: int | None) -> Any:
    """The first so many observations; and torch gets its threads."""
    seen = policy.observations(observations)

    import torch

    from blockcache.observations import rows
    from blockcache_runtime.cores import cores

    torch.set_num_threads(threads or cores())
    return rows(seen, 0, count)


def _written(chosen: ChosenSampler, output: str) -> None:
    """Save it, and say what it is worth and what it took."""
    chosen.save(output)
    told, sampler = chosen.evidence, chosen.sampler
    times = ", ".join(f"{time:g}" for time in sampler.timesteps or ())
    click.echo(f"{output}: {sampler.type}, {sampler.num_inference_steps} steps at {times}")
    for name in ("before", "after"):
        click.echo(f"{name:6}  {_closeness(told[name])}")
    own, other = (told["generations"][name] for name in ("own", "other"))
    click.echo(
        f"on {told['held_back']} held-back observations; took {own} generations of the policy's own sampler and {other} of "
        f"{sampler.num_inference_steps} steps, {told['seconds']:.0f} s"
    )


def _closeness(found: Mapping[str, float]) -> str:
    return (
        f"energy distance {found['energy']:.4f}, centre shift {found['centre_shift']:.4f}, spread {found['spread']:.2f}"
    )
