"""The verb `eval`: paired rollouts of several methods on a task, and the table of what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blockcache.cli.arguments import load_observations
from blockcache.cli.rollouts import (
    chosen_backend,
    exit_if_failed,
    resumable,
    rollouts_option,
    run_options,
)
from blockcache.files import check_writable

if TYPE_CHECKING:
    from blockcache.compare.evaluation import Evaluation
    from blockcache.tasks import Task
    from blockcache.tasks.video import Frame


@click.command("eval")
@click.argument("task")
@click.argument("policy", required=False)
@click.option(
    "-m",
    "--method",
    "methods",
    multiple=True,
    default=("bac:S=10,n=5",),
    show_default=True,
    help="What to compare with the full policy; may be given often.",
)
@click.option("-o", "--output", default="results.json", show_default=True, help="Where to write the results.")
@rollouts_option
@click.option("--seed", type=click.IntRange(min=0), help="First environment seed. Default: the task's first test seed.")
@run_options
@click.option("--repeats", type=click.IntRange(min=0), default=5, show_default=True, help="Timed chunks per method.")
@click.option("--video", metavar="FILE", help="A .gif or .mp4 of the first episode: full beside the last method.")
def evaluate(
    task: str,
    policy: str | None,
    methods: tuple[str, ...],
    output: str,
    rollouts: int,
    seed: int | None,
    group: int,
    engine: str,
    workers: int | None,
    ray: str | None,
    observations: str | None,
    generations: int,
    repeats: int,
    video: str | None,
) -> None:
    """Let POLICY do TASK under several methods: the same episodes, the same noise, compared pair by pair.

    POLICY is a policy directory or the name of a shipped one; without it, the shipped one for the task.

    \b
    Methods:
      full                          everything computed; always among the methods
      uniform:S=10  unified:S=10    schedules, solved from a calibration on the policy's observations;
      blockwise:S=10  bac:S=10,n=5  also metric=cosine|mse|l1|wasserstein, objective=anchor|consecutive
      teacache:threshold=0.1        decides while it runs
      ddim-16  sde-dpmsolver++-8    fewer denoising steps instead, by any sampler's name
      ddim-40+bac:S=5,n=3           both, calibrated with that sampler
      schedule.json                 a schedule file

    Finished groups of rollouts are kept beside the results: interrupted or killed, the same command goes on from there
    and writes the same file. The exit code is 1 if a simulator failed in some rollout.

    \b
    Examples:
      blockcache eval pusht
      blockcache eval pusht -m bac:S=10,n=5 -m uniform:S=16 -m ddim-16 --rollouts 250 -o pusht.json
      blockcache eval pusht my_policy/ -m schedule.json --engine patched --video side_by_side.gif
      blockcache eval pusht -m bac --ray auto
    """
    for path in filter(None, (output, video)):
        check_writable(path)

    from blockcache.compare.evaluation import prepare, save_timings
    from blockcache.models.dpt import load_policy
    from blockcache.models.dpt.checkpoint import shipped_policy
    from blockcache.report.evaluation import evaluation_blocks
    from blockcache.report.terminal import display
    from blockcache.tasks import task_spec
    from blockcache.tasks.video import check_video

    backend = chosen_backend(workers, ray)
    if video is not None:
        check_video(video)
    task_spec(task)  # an unknown one is refused as such, not as a policy
    source = str(shipped_policy(task)) if policy is None else policy
    loaded = load_policy(source)
    state = Path(output).with_suffix(".state")
    with resumable(state):
        evaluation = prepare(
            loaded,
            task,
            methods,
            load_observations(loaded, source, observations),
            state=state,
            source=policy or task,
            rollouts=rollouts,
            first_seed=seed,
            group=group,
            engine=engine,
            generations=generations,
        )
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
    from tqdm import tqdm

    film: list[Frame] = []
    with tqdm(desc=f"filming {name}", total=evaluation.task.max_steps + 1, unit="frame") as bar:

        def watch(task: Task) -> None:
            film.append(task.render())
            bar.update()

        done = evaluation.play(name, evaluation.seeds[0], watch)
    return f"{name}: {'failed' if done.score is None else f'{done.score:.2f}'}", film


COMMANDS = (evaluate,)
