"""Of the group `paper`: its protocol, "max / mean of the last 10 checkpoints" over several training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.errors import FileError
from blockcache.files import make_directory

if TYPE_CHECKING:
    from blockcache.compare.methods import Method
    from blockcache.results.rollouts import Results


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-m",
    "--method",
    "methods",
    type=arg.METHOD,
    multiple=True,
    default=("bac:S=10,n=5",),
    help="A method to compare; may be repeated.",
)
@click.option("-o", "--output", type=arg.OUTPUT_DIRECTORY, default="out/checkpoints", help="Directory for the results.")
@click.option("--first-seed", type=arg.SEED, help="First environment seed. Default: the task's first test seed.")
@arg.run_options
def checkpoints(
    runs: tuple[Path, ...],
    methods: tuple[Method, ...],
    output: Path,
    first_seed: int | None,
    task: str | None,
    workers: int | None,
    ray: str | None,
    observations: str | None,
    **run_settings: Any,
) -> None:
    """The paper's protocol: how the last checkpoints of training RUNS do, in full and under methods.

    A RUN is a policy that 'policy train --keep-last N' left, with its checkpoints and recorded observations beside it; runs
    differ in their training seed. Every checkpoint meets the same episodes. Killed, the same command goes on.

    \b
    Example:
      blockcache paper checkpoints out/square-seed0 out/square-seed1 out/square-seed2 -o out/square-checkpoints
    """
    from blockcache.compare.evaluation import prepare
    from blockcache.compare.methods import method_named
    from blockcache.report.document import table
    from blockcache.report.terminal import display
    from blockcache_lab.studies.checkpoints import protocol
    from blockcache_lab.training.loop import checkpoints_of

    kept = {run: sorted(checkpoints_of(run).glob("*/config.json")) for run in runs}
    if bare := [str(run) for run, found in kept.items() if not found]:
        raise FileError(f"{bare[0]} has no checkpoints beside it; train it with 'policy train --keep-last 10'")
    backend = arg.chosen_backend(workers, ray)
    results: dict[str, list[Results]] = {}
    with arg.resumable(output):
        for run, files in kept.items():
            seen = observations or str(run / "observations.npz")
            directory = output / run.name
            make_directory(directory)
            results[run.name] = []
            for file in files:
                policy = arg.PolicySource(str(file.parent))
                path = directory / f"{file.parent.name}.json"
                evaluation = prepare(
                    policy.port,
                    policy.task(task),
                    methods,
                    policy.observations(seen),
                    state=output / "state",
                    source=str(policy),
                    first_seed=first_seed,
                    **run_settings,
                )
                evaluation.check_output(path)
                results[run.name].append(evaluation.run(backend))
                results[run.name][-1].save(path)
    rows = []
    for row in protocol(results):
        runs_of = [f"{max(scores):.3f} / {sum(scores) / len(scores):.3f}" for scores in row.scores.values()]
        rows.append([method_named(row.method).label, *runs_of, f"{row.best:.3f} / {row.mean:.3f}"])
    display(table(["method", *(f"{name}: max / mean" for name in results), "all runs: max / mean"], rows))
