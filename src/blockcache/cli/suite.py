"""The verbs `suite` and `results`: the paper's comparisons, and the page that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blockcache.cli.arguments import given, load_observations
from blockcache.cli.rollouts import (
    chosen_backend,
    exit_if_failed,
    resumable,
    rollouts_option,
    run_options,
)
from blockcache.errors import TaskError
from blockcache.files import check_writable, make_directory, write_bytes
from blockcache.studies.suites import SUITES, TIMINGS

if TYPE_CHECKING:
    from blockcache.report.suites import SuiteResults


@click.command()
@click.argument("name", metavar="NAME", type=click.Choice([*SUITES, "timing"]))
@click.argument("policy")
@click.option("-o", "--output", default="out/suites", show_default=True, help="Directory, shared by all suites.")
@click.option("--task", help="Default: the one that the policy says it was trained for.")
@rollouts_option
@click.option(
    "--main-rollouts",
    type=click.IntRange(min=1),
    default=250,
    show_default=True,
    help="In suite main, of full, BAC, and Uniform, DDIM and DDPM at equal FLOPs.",
)
@run_options
@click.option("--repeats", type=click.IntRange(min=1), default=20, show_default=True, help="Of timing: rounds.")
@click.option("--quick", is_flag=True, help="A few short rollouts, to see that it works. No results.")
def suite(
    name: str,
    policy: str,
    output: str,
    task: str | None,
    rollouts: int,
    main_rollouts: int,
    group: int,
    engine: str,
    workers: int | None,
    ray: str | None,
    observations: str | None,
    generations: int,
    repeats: int,
    quick: bool,
) -> None:
    """Run one of the paper's comparisons on POLICY (a directory or a shipped one), in closed loop.

    \b
    Suites, one factor at a time around BAC with S = 10, n = 5, cosine:
      main      BAC against Uniform, TeaCache, DDIM and DDPM with fewer steps, at equal FLOPs
      ablation  what each part of BAC is worth; anchor against consecutive
      metrics   cosine, MSE, L1, Wasserstein
      n-and-s   S in 3, 5, 7, 10, 20; n in 0, 1, 3, 5, 8
      ddim      BAC on DDIM-40 against fewer DDIM steps
      timing    no rollouts: milliseconds of all these methods in one interleaved run; leave the machine alone meanwhile

    Writes OUTPUT/NAME.json. Finished rollouts are kept in OUTPUT/state for all suites: interrupted or killed, the same
    command goes on from there, more rollouts build on those that are there, and a method in two suites runs once. The
    exit code is 1 if a simulator failed in some rollout.

    \b
    Examples:
      blockcache suite main pusht
      blockcache suite ddim pusht --rollouts 100 --workers 2
      blockcache suite timing pusht
      blockcache suite main pusht --quick -o /tmp/quick
    """
    check_writable(output, directory=True)

    from blockcache.compare.evaluation import save_timings
    from blockcache.models.dpt import load_policy
    from blockcache.models.port import examine
    from blockcache.report.suites import SuiteResults
    from blockcache.studies.suite_runs import QUICK, RolloutCounts, SuiteSetting, prepare_suite, time_suites

    if quick and name == "timing":
        raise click.UsageError("timing has no quick form; ask for fewer --repeats")
    if quick and (ignored := given(["rollouts", "main_rollouts", "group", "generations"])):
        raise click.UsageError(f"{', '.join(ignored)} and --quick exclude one another: a quick run has its own amounts")
    backend = chosen_backend(workers, ray)
    loaded = load_policy(policy)
    chosen = task or loaded.config.task
    if chosen is None:
        raise TaskError(f"the policy {policy} does not say which task it was trained for; name it with --task")
    state, path = Path(output) / "state", Path(output) / f"{name}.json"
    ground = SuiteSetting(
        loaded,
        chosen,
        load_observations(loaded, policy, observations),
        state,
        QUICK if quick else RolloutCounts(rollouts, main_rollouts, group, generations),
        policy,
        engine,
    )
    make_directory(output)
    if name == "timing":
        save_timings(Path(output) / TIMINGS, time_suites(ground, output, repeats), examine(loaded).fingerprint)
        click.echo(f"written to {Path(output) / TIMINGS}")
        return
    with resumable(state):
        ready = prepare_suite(ground, name)
        ready.check_output(path)
        results = ready.run(backend)
    results.save(path)
    _print(SuiteResults(ready.suite, results))
    click.echo(f"\nwritten to {path}; 'blockcache results {output} -o docs' makes the page")
    exit_if_failed(results, path)


@click.command()
@click.argument("directory")
@click.argument("others", nargs=-1)
@click.option("-o", "--output", default="docs", show_default=True, help="Where to write results.md and its picture.")
@click.option("--stored", metavar="FILE", help="Also write the small summary that the demo shows as stored.")
def results(directory: str, others: tuple[str, ...], output: str, stored: str | None) -> None:
    """Make the page of results from the suites' files in DIRECTORY, whichever are there.

    OTHERS hold suite main of other policies, such as those of other tasks or training seeds: the page sums them up.

    \b
    Examples:
      blockcache results out/suites -o docs
      blockcache results out/suites out/assembly-seed0 out/assembly-seed1 -o docs
      blockcache results out/suites -o docs --stored src/blockcache/assets/stored_results.json
    """
    check_writable(output, directory=True)
    if stored is not None:
        check_writable(stored)

    from blockcache.report.figures import require_matplotlib
    from blockcache.report.markdown import render
    from blockcache.report.other_policies import load_other_policies
    from blockcache.report.results import PICTURE, page
    from blockcache.report.stored import summarise_main
    from blockcache.report.suites import Collection
    from blockcache.report.tradeoff import plot_tradeoff

    require_matplotlib()
    collection, further = Collection.load(directory), load_other_policies(others)
    if stored is not None:
        summarise_main(collection).save(stored)
        click.echo(stored)
    make_directory(output)
    plot_tradeoff(collection, Path(output) / PICTURE)
    write_bytes(Path(output) / "results.md", render(page(collection, directory, further)).encode())
    click.echo(f"{Path(output) / 'results.md'}")
    if collection.missing:
        click.echo(f"missing suites: {', '.join(collection.missing)}")
    if collection.timings is None:
        click.echo(f"missing timings: run 'blockcache suite timing POLICY -o {directory}'")


def _print(found: SuiteResults) -> None:
    from blockcache.report.document import Paragraph
    from blockcache.report.methods import DIFFERENCE, REFERENCE, SCORE, suite_tables
    from blockcache.report.terminal import display

    columns = ("method", "n", SCORE, DIFFERENCE, "lossless", "success", "GFLOP", REFERENCE)
    notes = (
        "Differences are paired, with 95 % intervals. Lossless: the interval's lower end is above -0.03.",
        "† shares the full policy's initial noise only: another sampler.",
    )
    quick = ["A quick run: a few shortened rollouts, no results."] if found.suite.quick else []
    display(*map(Paragraph, quick), *suite_tables(found, columns), Paragraph(" ".join(notes)))


COMMANDS = (suite, results)
