"""A document as Markdown, with tables as GitHub has them. Knows nothing of what the document is about."""

from __future__ import annotations

import html
from collections.abc import Iterable

from blockcache.report.document import (
    Block,
    Bullets,
    Chart,
    Document,
    Facts,
    Figure,
    Folded,
    Paragraph,
    Section,
    Table,
    spans,
)


def render(document: Document) -> str:
    """The whole page. Inline markup is Markdown's already, so text goes in as it is."""
    return "\n".join([f"# {document.title}", "", *_blocks(document.blocks, 2)])


def _blocks(blocks: Iterable[Block], level: int) -> list[str]:
    """Lines, with an empty one behind each block. `level` is that of the sections among them."""
    return [line for block in blocks for line in (*_lines(block, level), "")]


def _lines(block: Block, level: int) -> list[str]:
    match block:
        case Paragraph(text):
            return [text] if text else []
        case Bullets(items):
            return [f"- {item}" for item in items]
        case Table():
            return _table(block)
        case Figure(path, alt, caption):
            return [f"![{alt}]({path})", *(["", caption] if caption else [])]
        case Facts(items):
            return [f"- **{fact.value}** {fact.what}" + f": {fact.note}" * bool(fact.note) for fact in items]
        case Chart():  # Markdown draws nothing
            return [f"**{block.title}.** {block.caption}".rstrip(), "", *_table(block.table)]
        case Folded(title, blocks):
            words = html.escape("".join(span.text for span in spans(title)), quote=False)  # HTML knows no Markdown
            return [f"<details><summary>{words}</summary>", "", *_blocks(blocks, level), "</details>"]
        case Section(title, blocks):
            return [f"{'#' * level} {title}", "", *_blocks(blocks, level + 1)[:-1]]


def _table(table: Table) -> list[str]:
    rule = ["---" if column.align == "left" else "---:" for column in table.columns]
    rows = [[column.name for column in table.columns], rule, *table.rows]
    above = [table.caption, ""] if table.caption else []
    return above + ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
