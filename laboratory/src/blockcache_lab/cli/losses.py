"""Of the group `paper`: the data that `check` and `tune` predict losses from, and how well they do so."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from blockcache.cli import arguments as arg


@click.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=arg.OUTPUT, metavar="FILE.json", default="losses.json", help="The data.")
@click.option("--page", type=arg.OUTPUT, metavar="FILE.md", help="Also write how well each task is predicted.")
@click.option("--render-only", is_flag=True, help="Measure nothing; judge the data in OUTPUT again.")
@click.option("--model", type=arg.OUTPUT, metavar="FILE.json", help="Also write what `check` and `tune` predict by.")
def losses(directories: tuple[Path, ...], output: str, page: str | None, render_only: bool, model: str | None) -> None:
    """What methods with known losses do to actions: the data that `check` and `tune` predict losses from.

    Every results file in the directories is read; the policies are loaded by the names that stand there, and those that
    cannot be are left out. Each method is drawn again exactly as it ran, without a simulator; where OUTPUT is there already,
    only what is missing from it. Then every task is predicted by all the others.

    \b
    Examples:
      blockcache paper losses docs/generated/records/* -o losses.json
      blockcache paper losses docs/generated/records/* -o losses.json --render-only --page losses.md --model model.json
    """
    from blockcache.errors import BlockcacheError
    from blockcache.files import exists, write_bytes
    from blockcache.report.markdown import render
    from blockcache.report.terminal import display
    from blockcache_lab.pages.losses import losses_document
    from blockcache_lab.studies.loss_data import LossData

    if render_only:
        data = LossData.load(output)
    else:
        from blockcache.results.rollouts import Results
        from blockcache_lab.studies.losses import measure_losses

        results, ports = [], {}
        for file in sorted(path for directory in directories for path in directory.glob("*.json*")):
            try:
                results.append(Results.load(file))
            except BlockcacheError:  # timings and distances lie there, too
                continue
            source = results[-1].policy["source"]
            if source not in ports:
                try:
                    policy = arg.PolicySource(source)
                    ports[source] = policy.port, policy.observations(None)
                except BlockcacheError as error:
                    click.echo(f"{source} is left out: {error}", err=True)
        before = LossData.load(output) if exists(output) else None
        data = measure_losses(results, ports, before, tell=partial(click.echo, err=True))
        data.save(output)
    if model is not None:
        data.model.save(model)
    document = losses_document(data)
    display(*document.blocks)
    if page is not None:
        write_bytes(page, render(document).encode())
