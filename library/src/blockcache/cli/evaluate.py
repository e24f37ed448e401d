"""The verb `eval`: paired rollouts of several methods on a task, and the table of what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.cli.rollouts import chosen_backend, exit_if_failed, resumable, run_options
from blockcache.compare.methods import NAMES, Method, parse_method

if TYPE_CHECKING:
    from blockcache.compare.evaluation import Evaluation
    from blockcache.tasks import Task
    from blockcache.tasks.video import Frame


def _method(text: str) -> Method:
    method = parse_method(text)
    method.check_files()
    return method


@click.command("eval", epilog=f"\b\nMethods:\n{NAMES}")
@arg.policy_argument()
@click.option(
    "-m",
    "--method",
    "methods",
    type=arg.Checked("method", _method),
    multiple=True,
    default=("bac:S=10,n=5",),
    help="What to compare with the full policy; may be given often.",
)
@click.option("-o", "--output", type=arg.OUTPUT, default="results.json", help="The results.")
@click.option("--first-seed", type=arg.SEED, help="First environment seed. Default: the task's first test seed.")
@run_options
@click.option("--repeats", type=click.IntRange(0, arg.MOST), default=5, help="Timed chunks per method.")
@click.option("--video", type=arg.OUTPUT, help="A .gif or .mp4 of the first episode: full beside the last method.")
def evaluate(
    policy: arg.PolicySource,
    methods: tuple[Method, ...],
    output: str,
    task: str | None,
    workers: int | None,
    ray: str | None,
    observations: str | None,
    repeats: int,
    video: str | None,
    **amount: Any,
) -> None:
    """Let POLICY do its task under several methods: the same episodes, the same noise, compared pair by pair.

    Finished groups of rollouts are kept beside the results: interrupted or killed, the same command goes on from there
    and writes the same file. The exit code is 1 if a simulator failed in some rollout.

    \b
    Examples:
      blockcache eval pusht
      blockcache eval pusht -m bac:S=10,n=5 -m uniform:S=16 -m ddim-16 --rollouts 250 -o pusht.json
      blockcache eval my_policy/ -m schedule.json --engine patched --video side_by_side.gif
      blockcache eval my_module:make_policy --task pusht --observations obs.npz -m bac --ray auto
    """
    from blockcache.tasks.video import check_video

    backend = chosen_backend(workers, ray)
    if video is not None:
        check_video(video)
    chosen, seen = policy.task(task), policy.observations(observations)

    from blockcache.compare.evaluation import prepare, save_timings
    from blockcache.report.evaluation import evaluation_blocks
    from blockcache.report.terminal import display

    state = Path(output).with_suffix(".state")
    with resumable(state):
        evaluation = prepare(policy.port, chosen, methods, seen, state=state, source=str(policy), **amount)
        evaluation.check_output(output)
        results = evaluation.run(backend)
        results.save(output)
        speed = evaluation.speed(repeats) if repeats else {}
        if speed:
            save_timings(Path(output).with_suffix(".timings.json"), speed, evaluation.fingerprint)
        display(*evaluation_blocks(results, speed, repeats))
        click.echo(f"\nwritten to {output}")
        if video is not None:
            _film(evaluation, video)
    exit_if_failed(results, output)


def _film(evaluation: Evaluation, path: str) -> None:
    from blockcache.tasks.video import write_video

    names = list(evaluation.candidates)
    write_video(path, dict(_watch(evaluation, name) for name in dict.fromkeys((names[0], names[-1]))))


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
