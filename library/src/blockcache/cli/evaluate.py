"""The verbs that judge methods: `eval` by paired rollouts on a task, `check` at recorded observations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.compare.methods import NAMES, Method, parse_method
from blockcache.results.rollouts import GENERATIONS, OBSERVATIONS, SAMPLES
from blockcache_runtime.cores import cores

if TYPE_CHECKING:
    from blockcache.compare.evaluation import Evaluation
    from blockcache.schedule import Schedule
    from blockcache.tasks import Clock, Task
    from blockcache.tasks.video import Frame
    from blockcache_runtime.rerun_file import RerunWatcher


@click.command("eval", epilog=f"\b\nMethods:\n{NAMES}")
@arg.policy_argument()
@click.option(
    "-m",
    "--method",
    "methods",
    type=arg.METHOD,
    multiple=True,
    default=("bac:S=10,n=5",),
    help="What to compare with the full policy; may be given often.",
)
@click.option("-o", "--output", type=arg.OUTPUT, default="results.json", help="The results.")
@click.option("--first-seed", type=arg.SEED, help="First environment seed. Default: the task's first test seed.")
@arg.run_options
@arg.until_settled_option
@click.option("--repeats", type=arg.COUNT_OR_0, default=5, help="Timed chunks per method.")
@click.option("--video", type=arg.OUTPUT, help="A .gif or .mp4 of the first episode: full beside the last method.")
@click.option("--rerun", type=arg.OUTPUT, help="A .rrd of that episode for the Rerun viewer: what both saw and did.")
@click.option("--clock", help="Let time pass while the policy computes: live, a time (40ms), or a file of times.")
@click.option("--rate", type=arg.POSITIVE, default=10.0, help="On the clock: actions in a second.")
@click.option("--replan", type=arg.COUNT, help="On the clock: actions from chunk to chunk. Default: half a chunk.")
@click.option("--stop", is_flag=True, help="On the clock: stop and think, instead of asking while the robot moves.")
@click.option("--rtc", is_flag=True, help="On the clock: tell each chunk what is executed while it is made.")
@click.option("--overlap", type=click.IntRange(0, 1000), default=0, help="With --rtc: how far the old chunk pulls.")
@click.option("--hold", is_flag=True, help="On the clock: let chunks run out, and hold the last action until the next.")
def evaluate(
    policy: arg.PolicySource,
    methods: tuple[Method, ...],
    output: str,
    task: str | None,
    workers: int | None,
    ray: str | None,
    observations: str | None,
    until_settled: bool,
    repeats: int,
    video: str | None,
    rerun: str | None,
    clock: str | None,
    **asked: Any,
) -> None:
    """Let POLICY do its task under several methods: the same episodes, the same noise, compared pair by pair.

    Finished groups of rollouts are kept beside the results: interrupted or killed, the same command goes on from there
    and writes the same file. The exit code is 1 if a simulator failed in some rollout.

    \b
    Examples:
      blockcache eval pusht
      blockcache eval pusht -m bac:S=10,n=5 -m uniform:S=16 -m ddim-16 --rollouts 250 -o pusht.json
      blockcache eval pusht -m bac -m ddpm-10 --until-settled --rollouts 500
      blockcache eval my_policy/ -m schedule.json --engine patched --video side_by_side.gif
      blockcache eval my_module:make_policy --task pusht --observations obs.npz -m bac --ray auto
      blockcache eval pusht/tuned --clock 400ms --rate 10 --replan 4 --rtc -o late.json --rerun late.rrd
      blockcache eval pusht -m bac --clock results.timings.json -o clock.json
    """
    from blockcache.tasks.video import check_video, write_video

    backend = arg.chosen_backend(workers, ray)
    if video is not None:
        check_video(video)
    if rerun is not None:
        from blockcache_runtime.rerun_file import check_rerun

        check_rerun(rerun)
    ticking = {name: asked.pop(name) for name in ("rate", "replan", "stop", "rtc", "overlap", "hold")}
    clocks: Callable[[str], Clock] | None = None
    if clock is not None:
        from blockcache.compare.clocks import choose_clock, read_latencies

        latencies = read_latencies(clock)

        def clocks(name: str) -> Clock:
            return choose_clock(latencies.of(name), policy.port.n_action_steps, **ticking)

    elif arg.given(ticking.keys() - {"rate"}):
        raise click.UsageError("--replan, --stop, --rtc, --overlap and --hold go with --clock")
    chosen, seen = policy.task(task), policy.observations(observations)

    from blockcache.compare.evaluation import Evaluation, prepare
    from blockcache.compare.sequential import run_until_settled
    from blockcache.report.evaluation import evaluation_blocks
    from blockcache.report.terminal import display
    from blockcache.results.rollouts import check_nothing_lost

    state = Path(output).with_suffix(".state")
    with arg.resumable(state):
        evaluation = prepare(policy.port, chosen, methods, seen, state=state, source=str(policy), clock=clocks, **asked)
        evaluation.check_output(output)
        results = (run_until_settled if until_settled else Evaluation.run)(evaluation, backend)
        check_nothing_lost(output, results.rollouts)
        command = arg.typed("output", "workers", "ray", "repeats", "video", "rerun")  # what no record depends on
        results = replace(results, setting={**results.setting, "command": command})
        results.save(output)
        timings = evaluation.speed(repeats) if repeats else None
        if timings is not None:
            timings.save(Path(output).with_suffix(".timings.json"))
        display(*evaluation_blocks(results, timings))
        click.echo(f"\nwritten to {output}")
        if video is not None:
            write_video(video, dict(_watch(evaluation, name) for name in _compared(evaluation)))
        if rerun is not None:
            _record(evaluation, rerun, ticking["rate"])
    arg.exit_if_failed(results, output)


def _compared(evaluation: Evaluation) -> tuple[str, ...]:
    """The full policy and the last method, which may be the same."""
    names = list(evaluation.candidates)
    return tuple(dict.fromkeys((names[0], names[-1])))


def _record(evaluation: Evaluation, path: str, rate: float) -> None:
    from blockcache_runtime.rerun_file import RerunFile

    with RerunFile(path) as file:
        for name in _compared(evaluation):
            watcher = file.watcher(name, rate)

            def show(task: Task, watcher: RerunWatcher = watcher) -> None:
                watcher.pictured(task.render())

            evaluation.play(name, evaluation.seeds[0], show, watcher)


def _watch(evaluation: Evaluation, name: str) -> tuple[str, list[Frame]]:
    """A method's first episode, with its caption."""
    from blockcache.progress import progress_bar

    film: list[Frame] = []
    with progress_bar(desc=f"filming {name}", total=evaluation.task.max_steps + 1, unit="frame") as bar:

        def watch(task: Task) -> None:
            film.append(task.render())
            bar.update()

        done = evaluation.play(name, evaluation.seeds[0], watch)
    return f"{name}: {'failed' if done.score is None else f'{done.score:.2f}'}", film


def _method_or_schedule(text: str) -> tuple[Schedule | Method, str]:
    """A schedule file or one of the paper's by name, read; else a method. And what it is called."""
    from blockcache.solvers.presets import published_names

    if Path(text).exists() or text.endswith(".json") or text in published_names():
        return arg.load_schedule(text), text
    method = parse_method(text)
    return method, method.name


@click.command(epilog=f"\b\nMethods:\n{NAMES}")
@arg.policy_argument(type=arg.POLICY_OR_EXPORT)
@click.argument("schedule", required=False)
@arg.observations_option
@click.option("-o", "--output", type=arg.OUTPUT, help="Keep the figures in this file (.json).")
@click.option("--against", type=arg.POLICY, metavar="POLICY", help="The policy that an export was made of.")
@click.option("--tolerance", type=click.FloatRange(0), default=1e-3, help="Of an export: the largest difference.")
@arg.sampler_file_option
@arg.tuned_option
@click.option("--count", type=click.IntRange(2, arg.MOST), default=OBSERVATIONS, help="Observations to compare at.")
@click.option("--samples", type=click.IntRange(4, arg.MOST), default=SAMPLES, help="Chunks for each observation; even.")
@click.option("--generations", type=arg.COUNT, default=GENERATIONS, help="Of the observations, only to calibrate on.")
@click.option("--seed", type=arg.SEED, default=0, help="Of the noise and the choice of observations.")
@click.option("--engine", type=arg.ENGINE, default="auto")
@click.option("--threads", type=arg.CORES, default=cores, show_default="all cores", help="Threads for the engine.")
def check(
    policy: arg.PolicySource | str,
    schedule: str | None,
    observations: str | None,
    output: str | None,
    against: arg.PolicySource | None,
    tolerance: float,
    sampler_file: str | None,
    tuned: Path | None,
    threads: int,
    **settings: Any,
) -> None:
    """Compare the actions of POLICY under SCHEDULE with those of the full policy, at recorded observations. No simulator.

    SCHEDULE is a schedule file, one of the paper's by name, or a method. In the place of both, an export FILE.onnx is
    compared --against the policy that it was made of, with the same noise: the exit code is 1 if they differ.

    \b
    Examples:
      blockcache check pusht.onnx --against pusht --count 16 -o parity.json
      blockcache check fast.onnx --against my_module:make_policy --tuned tuned/
      blockcache check pusht schedule.json
      blockcache check pusht ddpm-10
      blockcache check my_module:make_policy bac:S=10,n=5,metric=mse --observations obs.npz -o check.json
    """
    if isinstance(policy, str) or against is not None:
        if not isinstance(policy, str) or against is None or schedule is not None:
            raise click.UsageError("--against compares an export: blockcache check FILE.onnx --against POLICY")
        if idle := arg.given(["samples", "generations", "seed", "engine", "threads"]):
            raise click.UsageError(f"{', '.join(idle)} have no meaning beside --against; leave them out")
        if tuned is not None and sampler_file is not None:
            raise click.UsageError("--tuned brings its own sampler; leave out --sampler-file")
        known = against.known_observations(observations)

        from blockcache.compare.parity import check_export

        port = against.port_with(sampler_file) if tuned is None else against.tuned(tuned)[0]
        parity = check_export(policy, port, known, settings["count"], tolerance)
        click.echo(f"{policy} {parity}")
        if output is not None:
            parity.save(output)
        if not parity.agrees:
            sys.exit(1)
        return
    if schedule is None or arg.given(["tolerance", "sampler_file", "tuned"]):
        raise click.UsageError("name a SCHEDULE to compare; or an export FILE.onnx, and --against what it was made of")
    chosen, name = _method_or_schedule(schedule)
    seen, moments = policy.observations(observations), policy.moments(observations)

    import torch

    from blockcache.compare.checker import check as run
    from blockcache.report.check import check_blocks
    from blockcache.report.terminal import display

    torch.set_num_threads(threads)
    found = run(
        policy.port, chosen, seen, moments=moments, source=str(policy), name=name, command=arg.typed(), **settings
    )
    display(*check_blocks(found))
    if output is not None:
        found.save(output)
        click.echo(f"\nwritten to {output}")
