"""Of the group `paper`: its comparisons in closed loop, their timing, and distances. Their pages are made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockcache.cli import arguments as arg
from blockcache.files import make_directory
from blockcache_lab.studies.suites import ALONE, DELAYS, DISTANCES, FRONTIER, KINDS, SUITES, TIMINGS

if TYPE_CHECKING:
    from blockcache_lab.studies.suite_results import SuiteResults
    from blockcache_lab.studies.suite_runs import SuiteSetting

output_option = click.option(
    "-o", "--output", type=arg.OUTPUT_DIRECTORY, default="out/suites", help="Directory, shared by all suites."
)
tuned_option = click.option(
    "--tuned",
    metavar="DIR",
    help=f"For the suites {' and '.join(ALONE)}: what 'blockcache tune' wrote for the policy, compared as well.",
)


def setting_options(verb: arg.Verb) -> arg.Verb:
    """The options that `timing` and `distances` share with `suite`."""
    for option in (arg.generations_option, arg.observations_option, arg.engine_option, arg.task_option, output_option):
        verb = option(verb)
    return verb


def _setting(
    name: str,
    policy: arg.PolicySource,
    output: Path,
    tuned: str | None,
    task: str | None,
    engine: str,
    observations: str | None,
    **counts: int,
) -> SuiteSetting:
    """What the suite of that name runs and by how much: as a quick run does, unless `counts` says otherwise.

    What was named is read before anything heavy is imported.
    """
    if tuned is not None and name not in ALONE:
        raise click.UsageError(f"--tuned is for the suites {' and '.join(ALONE)}")
    chosen, seen = policy.task(task), policy.observations(observations)

    from blockcache_lab.studies.suite_runs import QUICK, RolloutCounts, SuiteSetting

    make_directory(output)
    amount = RolloutCounts(**counts) if counts else QUICK
    setting = SuiteSetting(policy.port, chosen, seen, output / "state", amount, str(policy), engine)
    return setting.for_suite(name, tuned)


@click.command()
@click.argument("name", metavar="NAME", type=click.Choice(tuple(KINDS)))
@arg.policy_argument()
@output_option
@arg.run_options
@arg.until_settled_option
@click.option(
    "--main-rollouts",
    type=arg.COUNT,
    default=250,
    help="In suite main, of full, BAC, and Uniform, DDIM and DDPM at equal FLOPs; in tables, of the first two; "
    "in frontier, of the tuned one.",
)
@tuned_option
@click.option("--quick", is_flag=True, help="A few short rollouts, to see that it works. No results.")
@click.option(
    "--delay",
    "delays",
    type=click.IntRange(0, 1000),
    multiple=True,
    default=DELAYS,
    help="Of suite realtime: control ticks that a chunk is late; may be repeated.",
)
def suite(
    name: str,
    policy: arg.PolicySource,
    output: Path,
    workers: int | None,
    ray: str | None,
    rollouts: int,
    until_settled: bool,
    main_rollouts: int,
    group: int,
    generations: int,
    tuned: str | None,
    quick: bool,
    delays: tuple[int, ...],
    **run: Any,
) -> None:
    """Run one of the paper's comparisons on POLICY, in closed loop, or one with what came after it.

    \b
    Suites, one factor at a time around BAC with S = 10, n = 5, cosine:
      main      BAC against Uniform, TeaCache, DDIM and DDPM with fewer steps, at equal FLOPs
      ablation  what each part of BAC is worth; anchor against consecutive; the last step as in the released code
      metrics   cosine, MSE, L1, Wasserstein
      n-and-s   S in 3, 5, 7, 10, 20; n in 0, 1, 3, 5, 8
      ddim      BAC on DDIM-40 against fewer DDIM steps
    And, on fresh seeds and each into a directory of its own:
      frontier  action costs, fewer steps, placed and fitted steps, what was tuned
      rdt       the paper's figure on RDT: BAC with S = 1, 2, 3, 5 against Uniform, fewer steps of DPM-Solver++, action
                costs, what was tuned; 100 rollouts of a method unless --rollouts says otherwise
      realtime  the paper's figure on a robot: every chunk arrives after a delay; asynchronous, told of the chunk before
                (RTC), and stop and think; each delay and mode into a file of its own, as many rollouts as rdt
      tables    BAC beside DDPM with fewer, placed and fitted steps: small enough for every task

    Writes OUTPUT/NAME.json. Finished rollouts are kept in OUTPUT/state for all suites: interrupted or killed, the same
    command goes on from there, more rollouts build on those that are there, and a method in two suites runs once. The
    exit code is 1 if a simulator failed in some rollout.

    \b
    Examples:
      blockcache paper suite main pusht
      blockcache paper suite ddim pusht --rollouts 100 --workers 2
      blockcache paper suite main pusht --quick -o /tmp/quick
      blockcache paper suite frontier pusht -o out/frontier --rollouts 250 --tuned tuned/
      blockcache paper suite rdt my_rdt/ -o out/rdt
      blockcache paper suite realtime pusht -o out/realtime --delay 0 --delay 4
    """
    if not KINDS[name].clocked and arg.given(["delays"]):
        raise click.UsageError("--delay is for the suite realtime")
    if KINDS[name].clocked and until_settled:
        raise click.UsageError("--until-settled is for suites with one file, not for realtime")
    if quick and (ignored := arg.given(["rollouts", "main_rollouts", "group", "generations"])):
        raise click.UsageError(f"{', '.join(ignored)} and --quick exclude one another: a quick run has its own amounts")
    rollouts = rollouts if arg.given(["rollouts"]) else KINDS[name].rollouts
    counts: dict[str, Any] = {"rollouts": rollouts, "main_rollouts": main_rollouts}
    counts |= {"group": group, "generations": generations}
    backend = arg.chosen_backend(workers, ray)
    setting = _setting(name, policy, output, tuned, **run, **({} if quick else counts))

    from blockcache.compare.evaluation import Evaluation
    from blockcache.compare.sequential import run_until_settled
    from blockcache.results.rollouts import check_nothing_lost
    from blockcache_lab.studies.suite_results import SuiteResults
    from blockcache_lab.studies.suite_runs import prepare_suite, run_realtime

    path = output / f"{name}.json"
    with arg.resumable(output / "state"):
        ready = prepare_suite(setting, name)
        done = {}
        if KINDS[name].clocked:
            for path, results in run_realtime(ready, output, delays, backend):
                done[path] = results
                click.echo(f"{path.stem}: {_scores(SuiteResults(ready.suite, results))}")
        else:
            ready.check_output(path)
            done[path] = ready.run(backend, run_until_settled if until_settled else Evaluation.run)
            check_nothing_lost(path, done[path].rollouts)
            done[path].save(path)
            _print(SuiteResults(ready.suite, done[path]))
    page = name if KINDS[name].alone else "results"
    written = path if len(done) == 1 else output
    click.echo(f"\nwritten to {written}; 'blockcache paper {page} {output}' makes the page")
    for path, results in done.items():
        arg.exit_if_failed(results, path)


@click.command()
@arg.policy_argument()
@setting_options
@click.option("--repeats", type=arg.COUNT, default=20, help="Interleaved rounds.")
@click.option(
    "--suite", "only", type=click.Choice(ALONE), help="This suite alone. Default: those of the paper on DP-T."
)
@tuned_option
def timing(
    policy: arg.PolicySource, output: Path, repeats: int, only: str | None, tuned: str | None, **run: Any
) -> None:
    """Milliseconds of all methods of all suites, in one interleaved run, so that any two can be compared.

    No rollouts; leave the machine alone meanwhile. Writes OUTPUT/timings.json, beside the files of the suites that it is of.

    \b
    Examples:
      blockcache paper timing pusht
      blockcache paper timing pusht --suite frontier -o out/frontier --tuned tuned/
      blockcache paper timing my_rdt/ --suite rdt -o out/rdt
    """
    names = SUITES if only is None else (only,)
    setting = _setting(names[0], policy, output, tuned, **run)

    from blockcache_lab.studies.suite_runs import time_suites

    time_suites(setting, output, repeats, names).save(output / TIMINGS)
    click.echo(f"written to {output / TIMINGS}")


@click.command()
@arg.policy_argument()
@setting_options
@click.option("--samples", type=click.IntRange(4, 10_000), default=64, help="Chunks for each observation.")
@tuned_option
def distances(policy: arg.PolicySource, output: Path, samples: int, tuned: str | None, **run: Any) -> None:
    """How far the actions of suite frontier's methods are from the policy's own, to set beside what they cost in rollouts.

    At observations that nothing was calibrated or fitted on. Writes OUTPUT/distances.json, beside the suite's file.

    \b
    Example:
      blockcache paper distances pusht -o out/frontier --tuned tuned/
    """
    setting = _setting(FRONTIER, policy, output, tuned, **run)

    from blockcache_lab.studies.frontier import measure_distances

    measure_distances(setting, output, samples).save(output / DISTANCES)
    click.echo(f"written to {output / DISTANCES}")


def _scores(found: SuiteResults) -> str:
    """The mean score of each method, in one line."""
    from blockcache.compare.methods import method_named

    rows = found.rows.items()
    return ", ".join(f"{method_named(name).label} {row.score.mean:.3f}" for name, row in rows if row.score is not None)


def _print(found: SuiteResults) -> None:
    from blockcache.report.document import Paragraph
    from blockcache.report.methods import DIFFERENCE, SCORE
    from blockcache.report.terminal import display
    from blockcache_lab.pages.suite_parts import REFERENCE, suite_tables

    columns = ("method", "n", SCORE, DIFFERENCE, "lossless", "success", "GFLOP", REFERENCE)
    notes = (
        "Differences are paired, with 95 % intervals. Lossless: the interval's lower end is above -0.03.",
        "† shares the full policy's initial noise only: another sampler.",
    )
    quick = ["A quick run: a few shortened rollouts, no results."] if found.suite.quick else []
    display(*map(Paragraph, quick), *suite_tables(found, columns), Paragraph(" ".join(notes)))
