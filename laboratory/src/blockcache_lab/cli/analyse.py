"""The verb `analyse`: every analysis of the paper for one policy, in one file."""

from __future__ import annotations

from pathlib import Path

import click

from blockcache.cli import arguments as arg
from blockcache_runtime.cores import cores


def _section(text: str) -> str:
    from blockcache_lab.analysis.file import check_names

    check_names([text])
    return text


@click.command()
@arg.policy_argument()
@click.option("-o", "--output", type=arg.OUTPUT, default="analysis.safetensors", help="The file of the analysis.")
@arg.observations_option
@click.option(
    "--recording", metavar="FILE", help="A recording of POLICY, best with action costs. Default: one is made."
)
@click.option("--schedule", metavar="FILE", help="A schedule of POLICY, analysed beside the paper's methods.")
@click.option("--weaker", type=arg.POLICY, help="A weaker policy for the same task: does caching hurt it more?")
@click.option(
    "--only",
    type=arg.CheckedText("name", _section),
    multiple=True,
    help="A section by name; may be repeated. Default: all.",
)
@arg.generations_option
@click.option(
    "--compared", type=click.IntRange(2, arg.MOST), default=16, help="Observations besides those, to measure errors at."
)
@click.option("--episodes", type=click.IntRange(2, arg.MOST), default=50, help="Episodes to compare with one another.")
@click.option("--seed", type=arg.SEED, default=0, help="Seed of the noise.")
@click.option("--page", type=arg.OUTPUT, help="Write the paper's claims and what was found as a page, too (.md).")
@click.option("--threads", type=arg.CORES, default=cores, show_default="all cores", help="Threads for torch.")
def analyse(
    policy: arg.PolicySource,
    output: str,
    observations: str | None,
    recording: str | None,
    schedule: str | None,
    weaker: arg.PolicySource | None,
    only: tuple[str, ...],
    seed: int,
    page: str | None,
    threads: int,
    **sizes: int,
) -> None:
    """Find out why caching works for POLICY, and where it hurts: every analysis of the paper, and whether its claims hold.

    What is finished is kept beside the output: interrupted or killed, the same command goes on from there. Sections:
    similarity, caching, sublayers, correlation, response, weights, features, homogeneity, stability, action-costs, weaker.

    \b
    Examples:
      blockcache analyse pusht
      blockcache analyse pusht --only similarity --only caching -o similarity.safetensors
      blockcache analyse my_policy/ --observations obs.npz --recording recording.safetensors --schedule schedule.json
      blockcache analyse good/ --weaker early/ --page claims.md
    """
    from blockcache.solvers.recording import Recording

    recorded = None if recording is None else Recording.load(recording)
    followed = None if schedule is None else arg.load_schedule(schedule)
    seen, moments = policy.observations(observations), policy.moments(observations)

    import torch

    from blockcache.files import write_bytes
    from blockcache.report.markdown import render
    from blockcache.report.terminal import display
    from blockcache_lab.pages.analysis import claims_blocks
    from blockcache_lab.pages.analysis import page as claims_page
    from blockcache_lab.studies.analyses import analyse as run
    from blockcache_lab.studies.analysis_inputs import AnalysisInputs, Sizes

    torch.set_num_threads(threads)
    state = Path(output).with_name(f"{Path(output).name}.state")
    with arg.resumable(state):
        other = None if weaker is None else (str(weaker), weaker.port)
        inputs = AnalysisInputs(policy.port, seen, state, recorded, followed, other, moments, Sizes(**sizes), seed)
        found = run(inputs, only, str(policy), arg.typed())
    found.save(output)
    display(*claims_blocks(found))
    size = Path(output).stat().st_size / 1e6
    click.echo(f"\n{output}: {len(found.sections)} sections, {size:.1f} MB")
    for name, reason in found.absent.items():
        click.echo(f"without {name}: {reason}")
    if page is not None:
        write_bytes(page, render(claims_page(found)).encode())
        click.echo(f"written to {page}")
