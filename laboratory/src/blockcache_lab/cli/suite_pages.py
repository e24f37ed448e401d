"""Of the group `paper`: the pages that show the suites, made from their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from blockcache.cli import arguments as arg
from blockcache.files import make_directory, read_bytes, write_bytes

if TYPE_CHECKING:
    from blockcache.report.document import Document

F = TypeVar("F", bound=Callable[..., Any])
directories_argument = click.argument("directories", nargs=-1, required=True)
stored_option = click.option(
    "--stored", type=arg.OUTPUT, help="Also write the small summary that the demo shows as stored."
)


def output_option(files: str) -> Callable[[F], F]:
    """The option that names the directory of a page and of its pictures."""
    return click.option("-o", "--output", type=arg.OUTPUT_DIRECTORY, default="out", help=f"Directory for {files}.")


def _write(page: Document, output: Path, name: str) -> None:
    """Write the page into the directory, as Markdown, and say where it is."""
    from blockcache.report.markdown import render

    make_directory(output)
    write_bytes(output / f"{name}.md", render(page).encode())
    click.echo(f"{output / name}.md")


@click.command()
@click.argument("directory")
@click.argument("others", nargs=-1)
@output_option("results.md and its picture")
@stored_option
def results(directory: str, others: tuple[str, ...], output: Path, stored: str | None) -> None:
    """Make the page of results from the suites' files in DIRECTORY, whichever are there.

    OTHERS hold suite main of other policies, such as those of other tasks or training seeds: the page sums them up.

    \b
    Examples:
      blockcache paper results out/suites
      blockcache paper results out/suites out/assembly-seed0 out/assembly-seed1 -o docs/generated
      blockcache paper results out/suites -o docs/generated --stored library/src/blockcache/assets/stored_results.json
    """
    from blockcache.report.drawing import require_matplotlib
    from blockcache_lab.pages.other_policies import load_other_policies
    from blockcache_lab.pages.pictures import plot_tradeoff
    from blockcache_lab.pages.results import PICTURE, page
    from blockcache_lab.studies.suite_results import Collection, summarise_suite

    require_matplotlib()
    collection, further = Collection.load(directory), load_other_policies(others)
    if stored is not None:
        summarise_suite(collection, "main").save(stored)
        click.echo(stored)
    _write(page(collection, directory, further), output, "results")
    plot_tradeoff(collection, output / PICTURE)
    if collection.missing:
        click.echo(f"missing suites: {', '.join(collection.missing)}")
    if collection.timings is None:
        click.echo(f"missing timings: run 'blockcache paper timing POLICY -o {directory}'")


@click.command()
@directories_argument
@output_option("frontier.md and its pictures")
@stored_option
def frontier(directories: tuple[str, ...], output: Path, stored: str | None) -> None:
    """Make the page of suite frontier from the files in DIRECTORIES, one for each policy.

    \b
    Examples:
      blockcache paper frontier out/frontier out/frontier-assembly -o docs/generated
      blockcache paper frontier out/frontier -o docs/generated --stored library/src/blockcache/assets/stored_results.json
    """
    from blockcache.report.drawing import require_matplotlib
    from blockcache_lab.pages.frontier import FrontierSuite, draw, page
    from blockcache_lab.studies.suite_results import summarise_suite

    require_matplotlib()
    found = [FrontierSuite.load(directory) for directory in directories]
    if stored is not None:
        summarise_suite(found[0]).save(stored)
        click.echo(stored)
    _write(page(found), output, "frontier")
    for item in found:
        draw(item, output)


@click.command()
@directories_argument
@output_option("rdt.md and its pictures")
def rdt(directories: tuple[str, ...], output: Path) -> None:
    """Make the page of suite rdt from the files in DIRECTORIES, one for each policy.

    \b
    Example:
      blockcache paper rdt out/rdt-push-cube out/rdt-pick-cube -o docs/generated
    """
    from blockcache.report.drawing import require_matplotlib
    from blockcache_lab.pages.pictures import plot_tradeoff
    from blockcache_lab.pages.rdt import page
    from blockcache_lab.pages.rdt_findings import RdtSuite

    require_matplotlib()
    found = [RdtSuite.load(directory) for directory in directories]
    _write(page(found), output, "rdt")
    for item in found:
        plot_tradeoff(item, output / item.picture)


@click.command()
@directories_argument
@output_option("realtime.md and its picture")
def realtime(directories: tuple[str, ...], output: Path) -> None:
    """Make the page of suite realtime from the files in DIRECTORIES, one for each policy.

    \b
    Example:
      blockcache paper realtime out/realtime-pusht out/realtime-metaworld-peg-insert-side -o docs/generated
    """
    from blockcache.report.drawing import draw_panels, require_matplotlib, save_figure
    from blockcache_lab.pages.realtime import PICTURE, RealtimeSuite, page

    require_matplotlib()
    found = [RealtimeSuite.load(directory) for directory in directories]
    _write(page(found), output, "realtime")
    save_figure(draw_panels([panel for item in found for panel in item.panels()], 3, 4.2, 3.4), output / PICTURE)


@click.command()
@directories_argument
@click.option("--checkpoints", multiple=True, help="What 'paper checkpoints' wrote for a task; may be repeated.")
@output_option("paper-tables.md")
def tables(directories: tuple[str, ...], checkpoints: tuple[str, ...], output: Path) -> None:
    """Make the page of the paper's tables beside what the suites in DIRECTORIES measured, one for each policy.

    Suites tables or main must be there; the cells of the others are added where they are.

    \b
    Example:
      blockcache paper tables out/tables-lift out/suites --checkpoints out/square-checkpoints -o docs/generated
    """
    from blockcache_lab.pages.policy_table import PolicyTable
    from blockcache_lab.pages.protocol import TrainingRuns
    from blockcache_lab.pages.tables import page

    runs = [TrainingRuns.load(directory) for directory in checkpoints]
    _write(page([PolicyTable.load(directory) for directory in directories], runs), output, "paper-tables")


@click.command()
@click.argument("pages", nargs=-1, required=True)
@click.option(
    "--records", type=click.Path(path_type=Path), default="docs/generated/records", help="The directory of all records."
)
def figures(pages: tuple[str, ...], records: Path) -> None:
    """Put the records' figures into PAGES that people write, between the marks that say which figure is meant.

    \b
    Example:
      blockcache paper figures README.md docs/*.md
    """
    from blockcache_lab.pages.figures import count, fill

    for page in pages:
        text = read_bytes(page, "page").decode()
        made = fill(text, records)
        if made != text:
            write_bytes(page, made.encode())
        click.echo(
            f"{page}: {count(made)} figures and tables" + ("" if made == text else ", now as the records have them")
        )
