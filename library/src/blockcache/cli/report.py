"""The verb `report`: one page from the files of one policy, and its figures for a paper."""

from __future__ import annotations

from pathlib import Path

import click

from blockcache.cli import arguments as arg


def _place(name: str) -> str:
    """Where a file or a directory is, or a shipped policy by its name."""
    from blockcache.files import exists
    from blockcache.models.policy_files import policy_directory, shipped_policies

    return str(policy_directory(name)) if name in shipped_policies() and not exists(name) else name


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option("-o", "--output", type=arg.OUTPUT, default="report.html", help="The page.")
@click.option("--figures", type=arg.OUTPUT_DIRECTORY, help="A directory for the figures, as SVG and PDF.")
def report(files: tuple[str, ...], output: str, figures: Path | None) -> None:
    """Make one page of the FILES of a policy: what is gained, what it costs, and why.

    FILES are any of: a policy's directory or the name of a shipped one, a recording, schedules, results, timings, a
    tuning, a check, an analysis, a benchmark's JSON, or directories of such files. The page needs no network and no
    server; a section whose file is missing says which command makes it.

    \b
    Examples:
      blockcache report docs/generated/records/frontier-pusht pusht
      blockcache report recording.safetensors schedule.json results.json -o page.html
      blockcache report tuned/ check.json
      blockcache report analysis.safetensors --figures figures/
    """
    from blockcache.report.html import require_plotly

    require_plotly()
    if figures is not None:
        from blockcache.report.drawing import require_matplotlib

        require_matplotlib()
    from blockcache.files import make_directory, write_bytes
    from blockcache.report.document import charts
    from blockcache.report.html import render
    from blockcache.report.overview.page import page
    from blockcache.report.overview.sources import load_sources

    document = page(load_sources({name: _place(name) for name in files}, arg.typed()))
    text = render(document).encode()
    write_bytes(output, text)
    drawn = charts(document.blocks)
    click.echo(f"{output}: {len(drawn)} figures, {len(text) / 1e6:.1f} MB; open it in a browser")
    if figures is not None:
        from blockcache.report.drawing import save_charts

        make_directory(figures)
        click.echo(f"{figures}: {len(save_charts(drawn, figures))} files")
