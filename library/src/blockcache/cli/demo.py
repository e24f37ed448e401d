"""The verb `demo`: the whole flow on one policy, in a few minutes."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.errors import ObservationError, TaskError

if TYPE_CHECKING:
    from blockcache.compare.candidates import Calibrations
    from blockcache.compare.methods import Method
    from blockcache.compare.showcase import Showcase


@click.command()
@arg.policy_argument(default="pusht")
@arg.observations_option
@arg.generations_option
@click.option("--repeats", type=arg.COUNT, default=7, help="Timed calls per method.")
@arg.threads_option
@click.option("--report", type=arg.OUTPUT, help="A page of what came out, such as demo.html.")
@click.option(
    "--seconds", type=click.IntRange(0, arg.MOST), default=150, help="For rollouts in the simulator; 0 leaves them out."
)
def demo(
    policy: arg.PolicySource,
    observations: str | None,
    generations: int,
    repeats: int,
    threads: int,
    report: str | None,
    seconds: int,
) -> None:
    """Calibrate, solve and accelerate POLICY (default: the shipped Push-T policy), and compare what comes out.

    First open loop: speed, and how far the actions are from the full policy's. Then closed loop: how well the task is
    done, in as many rollouts as the time allows.

    \b
    Examples:
      blockcache demo
      blockcache demo --seconds 600
      blockcache demo --seconds 0
      blockcache demo my_policy/ --generations 32 --report demo.html
    """
    if report is not None:
        from blockcache.report.html import require_plotly

        require_plotly()
    seen = policy.observations(observations)

    import torch

    from blockcache.compare.candidates import Calibrations
    from blockcache.compare.dealing import CALIBRATION, COMPARISON, deal_for_evaluation
    from blockcache.observations import batch_size

    torch.set_num_threads(threads)
    port, total = policy.port, batch_size(seen)
    weights = sum(parameter.numel() for parameter in port.adapter.denoiser.parameters())
    click.echo(
        f"{policy}: {len(port.adapter.layers)} layers x {port.adapter.widths.get('width', '?')}, {len(port.timesteps)} "
        f"{port.sampling.settings['type'].upper()} steps, {weights / 1e6:.2f} M parameters"
    )
    if total <= generations:
        raise ObservationError(f"of {total} observations, {generations} to calibrate on leave none to compare on")
    with tempfile.TemporaryDirectory() as kept:  # one calibration for both comparisons
        dealt = deal_for_evaluation(seen, generations)
        calibrations = Calibrations(port, dealt[CALIBRATION], keep=kept)
        _open_loop(calibrations, dealt[COMPARISON], repeats)
        found = _closed_loop(policy, seen, generations, seconds, kept) if seconds else None
        if report is not None:
            _write_page(policy, calibrations, found, report)


def _open_loop(calibrations: Calibrations, observations: Any, repeats: int) -> None:
    import torch

    from blockcache.compare.methods import FULL, Method
    from blockcache.compare.parts import FewerSteps
    from blockcache.compare.reuse_parts import BAC, Uniform
    from blockcache.compare.tradeoff import tradeoff
    from blockcache.report.evaluation import open_loop_blocks
    from blockcache.report.terminal import display

    recording, bac = calibrations.recording(action_costs=True), Method(reuse=BAC())
    click.echo(f"calibrated on {recording.generations} generations in {recording.origin['seconds']:.0f} s\n")
    equal = calibrations.action_budget(calibrations.candidate(bac).flops(calibrations.port, 0.0))
    methods = [
        (Method(FewerSteps("ddim", 16)), None),
        (Method(reuse=Uniform()), "patched"),
        (bac, "patched"),
        (bac, "auto"),
        (equal, "auto"),
        (FULL, "auto"),
    ]
    candidates = [(method.label, calibrations.candidate(method, engine)) for method, engine in methods]
    result = tradeoff(calibrations.port, candidates, observations, repeats=repeats)
    display(*open_loop_blocks(result, repeats, torch.get_num_threads()))


def _tuned(policy: arg.PolicySource) -> list[Method]:
    """What lies beside the policy, tuned for it, as a method."""
    from blockcache.compare.methods import Method
    from blockcache.compare.parts import TunedFiles
    from blockcache.models.policy_files import TUNED, TUNING, in_directory, policy_directory

    directory = policy_directory(policy.name) / TUNED if in_directory(policy.name) else None
    return [Method(TunedFiles(str(directory)))] if directory and (directory / TUNING).is_file() else []


def _write_page(policy: arg.PolicySource, calibrations: Calibrations, found: Showcase | None, path: str) -> None:
    """One page of what was just calibrated, solved and rolled out, and of what lies beside the policy."""
    from blockcache.files import write_bytes
    from blockcache.measure.machine import describe
    from blockcache.models.policy_files import TUNING
    from blockcache.report.html import render
    from blockcache.report.overview.page import page
    from blockcache.report.overview.sources import Source, Sources
    from blockcache.results.timings import Timings
    from blockcache.results.tuning import Tuning
    from blockcache.solvers import solve

    command, recording = arg.typed(), calibrations.recording(action_costs=True)
    tunings = [Tuning.load(f"{method.tuned_in}/{TUNING}") for method in _tuned(policy)]
    results, timings = [], []
    if found is not None:
        speed = f"seconds per chunk, batch 1, one torch thread, {found.repeats} interleaved rounds"
        results = [Source(command, found.results)]
        timings = [Source(command, Timings(recording.fingerprint, describe(), speed, found.speed))]
    made = Sources(
        recordings=(Source(command, recording),),
        schedules=(Source(command, solve(recording)),),
        results=tuple(results),
        timings=tuple(timings),
        tunings=tuple(Source(f"{policy}/tuned/{TUNING}", tuning) for tuning in tunings),
        command=command,
    )
    write_bytes(path, render(page(made)).encode())
    click.echo(f"\nAll of it as one page, to be opened in a browser: {path}")


def _closed_loop(
    policy: arg.PolicySource, observations: Any, generations: int, seconds: int, kept: str
) -> Showcase | None:
    from blockcache.compare.jobs import local_workers
    from blockcache.compare.showcase import METHODS, showcase
    from blockcache.report.evaluation import closed_loop_blocks
    from blockcache.report.terminal import display
    from blockcache.results.stored import shipped
    from blockcache.tasks import make_task

    try:
        task = policy.port.task
        if task is None:
            raise TaskError("the policy does not say which task it was trained for")
        make_task(task).close()  # a missing simulator shows now
        click.echo(f"\nNow in the simulator, for about {seconds} s:")
        found = showcase(
            policy.port,
            task,
            observations,
            seconds,
            state=kept,
            generations=generations,
            source=str(policy),
            methods=(*METHODS, *_tuned(policy)),
            backend=local_workers(),
        )
    except TaskError as error:
        click.echo(f"\nNo rollouts here: {error}.")
        return None
    stored = shipped()
    weights = found.results.policy["fingerprint"]["weights"]
    fits = stored is not None and (stored.task, stored.weights) == (found.results.task["name"], weights)
    click.echo()
    display(*closed_loop_blocks(found.results, found.speed, stored if fits else None))
    return found
