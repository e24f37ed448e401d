"""A document as Markdown, with tables as GitHub has them. Knows nothing of what the document is about."""

from __future__ import annotations

import html
from collections.abc import Iterable

from blockcache.report import document as doc


def render(document: doc.Document) -> str:
    """The whole page. Inline markup is Markdown's already, so text goes in as it is.

    Args:
        document: The report.
    """
    return "\n".join([f"# {document.title}", "", *_blocks(document.blocks, 2)])


def _blocks(blocks: Iterable[doc.Block], level: int) -> list[str]:
    """Lines, with an empty one behind each block. `level` is that of the sections among them."""
    return [line for block in blocks for line in (*_lines(block, level), "")]


def _lines(block: doc.Block, level: int) -> list[str]:
    match block:
        case doc.Paragraph(text):
            return [text] if text else []
        case doc.Bullets(items):
            return [f"- {item}" for item in items]
        case doc.Table():
            return _table(block)
        case doc.Figure(path, alt, caption):
            return [f"![{alt}]({path})", *(["", caption] if caption else [])]
        case doc.Facts() | doc.Chart():  # Markdown draws nothing
            return _blocks(doc.in_words(block), level)[:-1]
        case doc.Folded(title, blocks):
            words = html.escape("".join(span.text for span in doc.spans(title)), quote=False)  # HTML knows no Markdown
            return [f"<details><summary>{words}</summary>", "", *_blocks(blocks, level), "</details>"]
        case doc.Section(title, blocks):
            return [f"{'#' * level} {title}", "", *_blocks(blocks, level + 1)[:-1]]


def _table(table: doc.Table) -> list[str]:
    rule = ["---" if column.align == "left" else "---:" for column in table.columns]
    rows = [[column.name for column in table.columns], rule, *table.rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
