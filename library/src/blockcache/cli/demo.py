"""The verb `demo`: the whole flow on one policy, in a few minutes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from blockcache.cli import arguments as arg
from blockcache.errors import ObservationError, TaskError

if TYPE_CHECKING:
    from blockcache.compare.candidates import Calibrations
    from blockcache.results.rollouts import Results
    from blockcache.results.timings import Timings

ClosedLoop: TypeAlias = "tuple[Results, Timings]"
GROUP, MOST, ROUNDS = 5, 250, 5  # rollouts at a time and at most, and timed rounds


@click.command()
@arg.policy_argument(default="pusht")
@arg.observations_option
@arg.generations_option
@click.option("--repeats", type=arg.COUNT, default=7, help="Timed calls per method.")
@arg.threads_option
@click.option("--report", type=arg.OUTPUT, help="A page of what came out, such as demo.html.")
@click.option("--seconds", type=arg.COUNT_OR_0, default=150, help="For rollouts in the simulator; 0 leaves them out.")
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
    from functools import partial

    from blockcache.compare.candidates import Candidate
    from blockcache.compare.evaluation import speed, with_engine
    from blockcache.compare.methods import FULL, Method
    from blockcache.compare.paired import Setting, open_loop, work
    from blockcache.compare.parts import FewerSteps
    from blockcache.compare.reuse_parts import BAC, Uniform
    from blockcache.report.evaluation import open_loop_blocks
    from blockcache.report.terminal import display
    from blockcache.results.rollouts import PLAIN

    recording, bac = calibrations.recording(action_costs=True), Method(reuse=BAC())
    click.echo(f"calibrated on {recording.generations} generations in {recording.origin['seconds']:.0f} s\n")
    equal = calibrations.action_budget(calibrations.candidate(bac).flops(calibrations.port, 0.0))
    asked = [(Method(FewerSteps("ddim", 16)), None), (Method(reuse=Uniform()), "patched"), (bac, "patched")]
    candidates = {PLAIN: Candidate()}
    for method, engine in (*asked, (bac, "auto"), (equal, "auto"), (FULL, "auto")):
        name = f"{method.label}{', patched' if method == bac and engine == 'patched' else ''}"
        candidate = calibrations.candidate(method, engine)
        candidates[name] = with_engine(calibrations.port, candidate) if engine == "auto" else candidate
    setting = Setting(calibrations.port, observations)
    times = speed(setting, candidates, repeats)
    methods, floor = open_loop(setting, candidates, partial(work, setting))
    display(*open_loop_blocks(methods, floor, times))


def _closed_loop(
    policy: arg.PolicySource, observations: Any, generations: int, seconds: int, kept: str
) -> ClosedLoop | None:
    from blockcache.compare.evaluation import prepare
    from blockcache.compare.jobs import local_workers
    from blockcache.compare.methods import Method
    from blockcache.compare.parts import FewerSteps, TunedFiles
    from blockcache.compare.reuse_parts import BAC
    from blockcache.observations import rows
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
        tuned = [Method(TunedFiles(str(directory))) for directory in _tuned(policy)]
        evaluation = prepare(
            policy.port,
            task,
            [Method(reuse=BAC()), Method(FewerSteps("ddpm", 16)), *tuned],
            rows(observations, 0, generations + 1),  # actions are compared elsewhere
            state=kept,
            source=str(policy),
            rollouts=MOST,
            group=GROUP,
            generations=generations,
        )
        times = evaluation.speed(ROUNDS, progress=False)
        results = evaluation.run_for(seconds, local_workers())
    except TaskError as error:
        click.echo(f"\nNo rollouts here: {error}.")
        return None
    stored = shipped()
    fits = stored is not None and (stored.task, stored.weights) == (task, evaluation.fingerprint.weights)
    click.echo()
    display(*closed_loop_blocks(results, times, stored if fits else None))
    return results, times


def _tuned(policy: arg.PolicySource) -> list[Path]:
    """The directory beside the policy with what was tuned for it, if there is one."""
    from blockcache.models.policy_files import TUNED, TUNING, in_directory, policy_directory

    directory = policy_directory(policy.name) / TUNED if in_directory(policy.name) else None
    return [directory] if directory and (directory / TUNING).is_file() else []


def _write_page(policy: arg.PolicySource, calibrations: Calibrations, found: ClosedLoop | None, path: str) -> None:
    """One page of what was just calibrated, solved and rolled out, and of what lies beside the policy."""
    from blockcache.files import write_bytes
    from blockcache.models.policy_files import TUNING
    from blockcache.report.html import render
    from blockcache.report.overview.page import page
    from blockcache.report.overview.sources import Source, Sources
    from blockcache.results.tuning import Tuning
    from blockcache.solvers import solve

    command, recording = arg.typed(), calibrations.recording(action_costs=True)
    closed = [] if found is None else [found]
    made = Sources(
        recordings=(Source(command, recording),),
        schedules=(Source(command, solve(recording)),),
        tunings=tuple(Source(f"{policy}/tuned/{TUNING}", Tuning.load(place / TUNING)) for place in _tuned(policy)),
        results=tuple(Source(command, results) for results, _ in closed),
        timings=tuple(Source(command, times) for _, times in closed),
        command=command,
    )
    write_bytes(path, render(page(made)).encode())
    click.echo(f"\nAll of it as one page, to be opened in a browser: {path}")
