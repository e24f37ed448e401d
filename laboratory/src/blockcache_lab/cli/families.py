"""Of the group `paper`: which policies are accepted, and what RDT's exact savings are worth at its real size."""

from __future__ import annotations

from pathlib import Path

import click

from blockcache.cli import arguments as arg
from blockcache.files import make_directory, write_bytes
from blockcache_lab.cli.studies import output_option, render_option


@click.command()
@click.option("-o", "--output", type=arg.OUTPUT, metavar="FILE.md", help="Write the table here, as Markdown.")
def families(output: str | None) -> None:
    """Try every engine on a small policy of each kind: what is accepted, and what is not and why.

    \b
    Examples:
      blockcache paper families
      blockcache paper families -o table.md
    """
    from dataclasses import asdict

    from blockcache.report.document import Document, Paragraph
    from blockcache.report.markdown import render
    from blockcache.report.terminal import display
    from blockcache_lab.pages.families import families_table
    from blockcache_lab.studies.families import accepted

    found = families_table([asdict(row) for row in accepted()])
    if output is None:
        display(found)
    else:
        about = (
            "A policy is recognised by its shape, never by its class. Made by `blockcache paper families -o FILE.md`, which "
            "tries every engine on a small policy of each kind. Where an engine says no, `auto` takes `patched`."
        )
        write_bytes(output, render(Document("Which policies are accepted", (Paragraph(about), found))).encode())


@click.command("rdt-size")
@output_option
@render_option
@click.option("--blocks", type=arg.LAYERS, default=28, help="Layers; even ones attend to language, odd ones to images.")
@click.option("--width", type=arg.SIZE, default=2048)
@click.option("--heads", type=arg.SIZE, default=32)
@click.option("--language-tokens", type=arg.SIZE, default=32, help="Of the instruction; the policy takes up to 1024.")
@click.option("--image-tokens", type=arg.SIZE, default=4374)
@click.option("--steps", type=arg.SIZE, multiple=True, default=(5, 20), help="Denoising steps; may be given twice.")
@click.option("--engine", "engines", type=click.Choice(["patched", "loop"]), multiple=True, default=("patched", "loop"))
@click.option("--repeats", type=arg.COUNT, default=1, help="Interleaved rounds.")
@arg.threads_option
def rdt_size(
    output: Path,
    render_only: bool,
    blocks: int,
    width: int,
    heads: int,
    language_tokens: int,
    image_tokens: int,
    steps: tuple[int, ...],
    engines: tuple[str, ...],
    repeats: int,
    threads: int,
) -> None:
    """Time the plain RDT of these sizes beside exact reuse of keys and values: seconds, differences, memory.

    Weights are random, and in memory once: about 5 GB at the default sizes, and minutes for a round. What the file holds of
    the same sizes with other numbers of steps stays, so that these can be measured one by one.

    \b
    Examples:
      blockcache paper rdt-size --threads 2
      blockcache paper rdt-size --threads 2 --steps 20 --engine loop
      blockcache paper rdt-size --blocks 4 --width 256 --heads 4 --image-tokens 500 --repeats 3
    """
    from blockcache.report.markdown import render
    from blockcache.report.terminal import display
    from blockcache_lab.pages.rdt_size import FORMAT, joined, page

    source = output / "rdt-size.json"
    if not render_only:
        from blockcache.models.rdt.policy import RDTConfig
        from blockcache_lab.studies.rdt_size import measure_size

        config = RDTConfig(
            depth=blocks,
            hidden_size=width,
            num_heads=heads,
            lang_len=language_tokens,
            max_lang_cond_len=max(language_tokens, 1024),
            img_cond_len=image_tokens,
        )
        measured = measure_size(config, steps, engines=engines, repeats=repeats, threads=threads)
        make_directory(output)
        before = FORMAT.load(source) if source.exists() else None
        rows = [{**row, "command": arg.typed()} for row in measured["rows"]]
        FORMAT.save(source, joined(before, {**measured, "rows": rows}))
    results = FORMAT.load(source)
    with FORMAT.reading(source):
        found = page(results)
    write_bytes(output / "rdt-size.md", render(found).encode())
    display(found)
