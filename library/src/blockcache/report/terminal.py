"""Documents, or parts of them, in a terminal: plain enough to be piped. Knows nothing of what they are about.

A table is as wide as its figures need: a pipe counts as 80 columns, which would cut them. Text is wrapped where somebody
watches, and left in one line in a pipe, so that it can be searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from blockcache.report import document as doc

Part: TypeAlias = doc.Document | doc.Block
_STYLES = {"plain": "", "code": "", "strong": "bold", "emphasis": "italic", "link": ""}
_UNLIMITED = 10_000  # columns


def display(*parts: Part) -> None:
    """Print the parts to standard output, with an empty line between them.

    Args:
        *parts: Documents, or blocks of one.
    """
    wide, own = Console(width=_UNLIMITED, markup=False, highlight=False), Console().width
    first = True
    for piece in (piece for part in parts for piece in _pieces(part)):
        if not first:
            wide.print()
        first = False
        if isinstance(piece, Text):
            wide.print(piece, width=own, soft_wrap=not wide.is_terminal)
        else:
            wide.print(piece)


def _pieces(part: Part) -> Iterator[RenderableType]:
    match part:
        case doc.Paragraph(text):
            if text:
                yield _text(text)
        case doc.Bullets(items):
            yield Text("\n").join(Text("- ").append_text(_text(item)) for item in items)
        case doc.Table():
            yield _table(part)
        case doc.Figure(path, alt, caption):
            yield Text(f"[{alt}: {path}]")
            if caption:
                yield _text(caption)
        case doc.Facts() | doc.Chart():
            for plain in doc.in_words(part):
                yield from _pieces(plain)
        case doc.Document(title, blocks) | doc.Section(title, blocks) | doc.Folded(title, blocks):
            yield _text(title, "bold")
            for block in blocks:
                yield from _pieces(block)


def _table(table: doc.Table) -> RichTable:
    made = RichTable(box=None, header_style="bold", pad_edge=False)
    for column in table.columns:
        made.add_column(_text(column.name), justify=column.align, no_wrap=True)
    for row in table.rows:
        made.add_row(*(_text(cell or "-") for cell in row))
    return made


def _text(text: str, style: str = "") -> Text:
    """Code keeps its marks: without colours nothing else would set it apart."""
    made = Text(style=style)
    for span in doc.spans(text.replace("\n", " ")):
        words = {"code": f"`{span.text}`", "link": f"{span.text} ({span.address})"}.get(span.kind, span.text)
        made.append(words, _STYLES[span.kind])
    return made
