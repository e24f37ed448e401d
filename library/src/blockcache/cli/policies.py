"""The verbs of `policy`: on the way to a policy, and to what it is calibrated and sampled with."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.compare.parts import SPREAD
from blockcache.files import check_writable
from blockcache.models.policy_files import check_new
from blockcache.samplers import sampler_names

if TYPE_CHECKING:
    from blockcache.samplers import ChosenSampler

WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin")  # of RDT


def _new(path: str) -> str:
    check_new(path)
    check_writable(path, directory=True)
    return path


@click.command()
@click.argument("source", metavar="CHECKPOINT")
@click.argument("output", metavar="OUT", type=arg.CheckedText("place", _new))
@click.option("--steps", type=arg.SIZE, default=100, help="Of a folder of schedules: steps of one generation.")
@click.option("-S", "--updates", type=arg.COUNT, help="Of a folder with several schedules: the one with S updates.")
@click.option("--metric", help="Of a folder with several schedules: the one by this metric.")
@click.option("--last", is_flag=True, help="Of a folder of schedules: all blocks at the last step too, as their code.")
def convert(source: str, output: str, steps: int, updates: int | None, metric: str | None, last: bool) -> None:
    """Make a policy directory OUT of a CHECKPOINT file that the public Diffusion Policy code wrote.

    Nothing in the file is run, and none of that code is needed. Weights (the averaged ones where the config says so), sizes,
    sampler and normaliser are those of the file; a policy that is not known in full is refused. Every verb takes the file
    itself, too, and keeps what it made of it.

    A file of weights of the public RDT code (.safetensors, pytorch_model.bin, or what DeepSpeed wrote, .pt) becomes an RDT
    policy with that code's sampler; sizes show in the weights.

    Where CHECKPOINT is a folder, it is one of the paper's authors' schedules (optimal_steps_MODULE_S_METRIC.pkl), and OUT is
    the schedule file to write.

    \b
    Examples:
      blockcache policy convert epoch=0650-test_mean_score=1.000.ckpt my_policy/
      blockcache policy convert mp_rank_00_model_states.pt my_rdt/
      blockcache policy convert optimal_steps/cosine/ schedule.json -S 10
    """
    if os.path.isdir(source):
        from blockcache.schedule.authors import read_authors_schedule

        schedule = read_authors_schedule(source, steps=steps, updates=updates, metric=metric, last=last)
        check_writable(output)
        schedule.save(output)
        size = f"{len(schedule.blocks)} blocks x {schedule.steps} steps"
        click.echo(f"{output}: {size}, {schedule.reused_share:.1%} reused")
        return
    if options := arg.given(["steps", "updates", "metric", "last"]):
        raise click.UsageError(f"{', '.join(options)} is for a folder of schedules; {source} is none")

    if source.endswith(WEIGHT_FILES):
        _convert_rdt(source, output)
        return

    from blockcache.models.dpt.public import convert_checkpoint

    config = convert_checkpoint(source, output).config
    cameras = f", cameras {', '.join(config.cameras)}" if config.cameras else ""
    click.echo(
        f"{output}: DP-T, {config.n_layer} layers x {config.n_emb}, {config.n_head} heads, horizon {config.horizon}"
        f"{cameras}, {config.sampler.num_inference_steps} {config.sampler.type} steps, {config.weights} weights; "
        f"{_megabytes(output)}"
    )
    trained = getattr(config.sampler, "num_train_timesteps", None)
    if config.sampler.type == "ddpm" and config.sampler.num_inference_steps != trained:
        click.echo(
            "note: fewer DDPM steps than in training are done as diffusers does them today; 0.11.1 did it otherwise"
        )


def _convert_rdt(source: str, output: str) -> None:
    from blockcache.models.rdt.runner import convert_weights

    config = convert_weights(source, output).config
    click.echo(
        f"{output}: RDT, {config.depth} layers x {config.hidden_size}, {config.num_heads} heads, horizon {config.horizon}, "
        f"{config.sampler.num_inference_steps} {config.sampler.type} steps; {_megabytes(output)}"
    )
    click.echo(
        "note: weights do not tell how norms divide; this is as timm 1.0.3 does it without Apex (norm in config.json)"
    )


def _megabytes(directory: str) -> str:
    return f"{sum(entry.stat().st_size for entry in os.scandir(directory)) / 1e6:.1f} MB"


@click.command()
@arg.policy_argument()
@arg.task_option
@click.option("-o", "--output", type=arg.OUTPUT, default="observations.npz", help="The file to write.")
@click.option("--episodes", type=arg.COUNT, default=16)
@click.option("--count", type=arg.COUNT, default=64, help="Observations to keep.")
@arg.first_seed_option
@click.option("--behind", metavar="FILE", help="A file of observations that shall stay in front of the new ones.")
@arg.threads_option
def observe(
    policy: arg.PolicySource,
    task: str | None,
    output: str,
    episodes: int,
    count: int,
    first_seed: int,
    behind: str | None,
    threads: int,
) -> None:
    """Let POLICY do its task and keep what it saw over whole episodes, to calibrate on and to check schedules with.

    \b
    Examples:
      blockcache policy observe my_policy/ -o my_policy/observations.npz
      blockcache policy observe my_module:make_policy --task pusht --episodes 32 --count 128
      blockcache policy observe my_policy/ --behind seen.npz --first-seed 1000 -o more.npz
    """
    chosen = policy.task(task)
    before = None if behind is None else (policy.observations(behind), policy.moments(behind))

    import torch

    from blockcache.compare.observe import observe as run

    torch.set_num_threads(threads)
    seen = run(policy.port, chosen, episodes, count, first_seed)
    if before is not None:
        seen = seen.appended_to(*before)
    seen.save(output)
    more = "" if before is None else f", {count} of them new, "
    click.echo(f"{output}: {len(seen)} observations{more or ' '}of {episodes} episodes")


def sampling_options(verb: arg.Verb) -> arg.Verb:
    """What `place` and `fit` share: the observations to use, and how."""
    threads = click.option("--threads", type=arg.CORES, help="Threads for torch. Default: all cores.")
    seed = click.option("--seed", type=arg.SEED, default=0, help="Of all noise and of what is held back.")
    count = click.option("--count", type=arg.COUNT, default=32, help="Observations to use; a quarter is held back.")
    return arg.observations_option(count(seed(threads(verb))))


@click.command()
@arg.policy_argument()
@click.option("-o", "--output", type=arg.OUTPUT, default="placed.json", help="The sampler file to write.")
@click.option("--steps", type=arg.COUNT, default=8)
@click.option("--sampler", type=click.Choice(sampler_names()), default="ddpm")
@sampling_options
def place(policy: arg.PolicySource, output: str, steps: int, sampler: str, seed: int, **seen: Any) -> None:
    """Find where the few steps of a sampler lie best for POLICY: start, end and spacing, then step by step.

    Judged by the energy distance between the actions that it draws and those of the policy's own sampler. The observations
    should come from closed loop, such as 'policy observe' keeps them.

    \b
    Examples:
      blockcache policy place pusht --steps 8 -o placed.json
      blockcache policy place my_policy/ --observations obs.npz --sampler sde-dpmsolver++
      blockcache eval pusht -m sampler:placed.json
    """
    observations = _seen(policy, **seen)

    from blockcache.fitting import place_steps

    _written(place_steps(policy.port, observations, steps, sampler, seed=seed), output)


@click.command()
@arg.policy_argument()
@click.option("-o", "--output", type=arg.OUTPUT, default="fitted.json", help="The sampler file to write.")
@click.option("--steps", type=arg.COUNT, default=5)
@click.option("--spread", type=arg.SHARE, default=SPREAD, help="1 keeps the spread of the actions; less is sharper.")
@click.option("--start", metavar="FILE", help="A sampler file to start from. Default: DDPM steps, placed first.")
@click.option("--iterations", type=arg.COUNT, default=100)
@click.option("--starts", type=arg.COUNT, default=1, help="So many fits, the others from steps moved at random.")
@click.option("--rate", type=arg.SHARE, default=0.02, help="Adam's first step.")
@click.option("--schedule", metavar="FILE", help="Fit through what it reuses; written beside OUTPUT for the result.")
@sampling_options
def fit(
    policy: arg.PolicySource,
    output: str,
    steps: int,
    spread: float,
    start: str | None,
    iterations: int,
    starts: int,
    rate: float,
    schedule: str | None,
    seed: int,
    **seen: Any,
) -> None:
    """Fit all constants of a sampler of few steps to POLICY, through the generation. No weight is touched.

    The constants that do best on held-back observations are kept; a fit that does not beat its start is refused. It is
    another sampler and so another distribution of actions: say so where its results stand.

    \b
    Examples:
      blockcache policy fit pusht --steps 5 -o fitted.json
      blockcache policy fit my_policy/ --observations obs.npz --spread 1 --start placed.json
      blockcache policy fit my_policy/ --start fitted.json --rate 0.004 --schedule schedule.json -o through.json
      blockcache eval pusht -m sampler:fitted.json -m sampler:fitted.json+bac:S=3,n=2
    """
    observations = _seen(policy, **seen)

    from blockcache.fitting import Effort, fit_sampler
    from blockcache.samplers import SamplerConfig
    from blockcache.schedule import Schedule

    begun = None if start is None else SamplerConfig.load(start)
    through = None if schedule is None else Schedule.load(schedule)
    effort = Effort(iterations, rate=rate, starts=starts)
    how: dict[str, Any] = {"start": begun, "schedule": through, "effort": effort, "seed": seed}
    found = fit_sampler(policy.port, observations, steps, spread, **how)
    _written(found, output)
    if through is not None:
        beside = f"{output.removesuffix('.json')}.schedule.json"
        replace(through, fingerprint=policy.port.with_sampler(found.sampler).fingerprint).save(beside)
        click.echo(f"{beside}: the schedule, for that sampler")


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
        found = told[name]
        click.echo(
            f"{name:6}  energy distance {found['energy']:.4f}, centre shift {found['centre_shift']:.4f}, "
            f"spread {found['spread']:.2f}"
        )
    own, other = (told["generations"][name] for name in ("own", "other"))
    click.echo(
        f"on {told['held_back']} held-back observations; took {own} generations of the policy's own sampler and {other} of "
        f"{sampler.num_inference_steps} steps, {told['seconds']:.0f} s"
    )
