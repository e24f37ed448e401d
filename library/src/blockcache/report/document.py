"""What a report says, as values: a document of sections, paragraphs, bullets, facts, tables, figures and charts.

Text has light inline markup, a part of Markdown's: `code`, **strong**, *emphasis* and [words](address), not inside one
another. A backslash in front of a mark shows the mark itself, and `plain` puts one in front of each mark in words from elsewhere. A line break
in a paragraph is a space to its reader. Knows nothing of terminals, of pages or of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from blockcache.report.chart import Panel

Kind: TypeAlias = Literal["plain", "code", "strong", "emphasis", "link"]
Align: TypeAlias = Literal["left", "right"]

_INSIDE = r"(?!\s)(?:\\.|[^\\*])+(?<!\s)"
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
_MARKS = re.compile(
    r"\\(?P<escaped>[!-/:-@\[-`{-~])"
    r"|`(?P<code>[^`]+)`"
    rf"|\*\*(?P<strong>{_INSIDE})\*\*"
    rf"|\*(?P<emphasis>{_INSIDE})\*"
    r"|\[(?P<link>(?:\\.|[^\\\[\]])+)\]\((?P<address>[^()\s]+)\)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Span:
    """A stretch of text in one style, as its reader sees it. `address` is where a link leads."""

    text: str
    kind: Kind = "plain"
    address: str = ""


def plain(words: str) -> str:
    """Text that shows `words` as they are, on one line: for names that were given by somebody else.

    Args:
        words: Any text, in which no mark means anything.
    """
    return re.sub(r"([\\`*_\[\]<&~])", r"\\\1", " ".join(words.split()))


def code(text: str) -> str:
    """A command or a file in a sentence."""
    return plain(text) if "`" in text or not text.strip() else f"`{' '.join(text.split())}`"


def spans(text: str) -> tuple[Span, ...]:
    """The text's inline markup, resolved."""
    found, place = [], 0
    for match in _MARKS.finditer(text):
        found += [Span(text[place : match.start()]), _span(match)]
        place = match.end()
    return tuple(span for span in (*found, Span(text[place:])) if span.text)


def _span(match: re.Match[str]) -> Span:
    if match["escaped"] or match["code"]:  # a backslash in code is a backslash
        return Span(match["escaped"]) if match["escaped"] else Span(match["code"], "code")
    kind: Kind = "strong" if match["strong"] else "emphasis" if match["emphasis"] else "link"
    return Span(_ESCAPED.sub(r"\1", match[kind]), kind, match["address"] or "")


@dataclass(frozen=True)
class Paragraph:
    """Some sentences. Without any it is an empty line."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences, one line each."""

    items: tuple[str, ...]

    def __post_init__(self) -> None:
        for item in self.items:
            _check_line("an item of a list", item)


@dataclass(frozen=True)
class Column:
    """The head of a column, and the side on which its cells stand."""

    name: str
    align: Align = "right"

    def __post_init__(self) -> None:
        _check_line("the name of a column", self.name)
        if self.align not in ("left", "right"):
            raise ValueError(f"a column stands on the left or on the right, got {self.align!r}")


@dataclass(frozen=True)
class Table:
    """Rows of cells, a cell for each column. An empty cell is a figure that there is not."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("a table needs at least one column")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells in a table of {len(self.columns)} columns: {row}")
            if any("\n" in cell for cell in row):
                raise ValueError(f"a cell is one line, got {row}")


def table(names: Sequence[str], rows: Iterable[Sequence[str]] | Iterable[Mapping[str, str]], *, left: int = 1) -> Table:
    """A table of names and figures.

    Args:
        names: The columns' heads.
        rows: Row by row, its cells in the order of the columns; or by the columns' heads, with others that are not shown.
        left: How many columns, from the first, hold names and so stand on the left; figures stand on the right.
    """
    columns = tuple(Column(name, "left" if place < left else "right") for place, name in enumerate(names))
    cells = ([row[name] for name in names] if isinstance(row, Mapping) else row for row in rows)
    return Table(columns, tuple(map(tuple, cells)))


def table_of(columns: Mapping[str, tuple[str, str]], rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table of records: `columns` gives for each head a field and the form of its figures; None is no figure.

    Args:
        columns: By head of a column, the field that it shows and the form of its figures, such as "{:.1f}".
        rows: The records; each has a value for every field that is shown.
    """
    cells = [["" if row[name] is None else form.format(row[name]) for name, form in columns.values()] for row in rows]
    return table(list(columns), cells)


@dataclass(frozen=True)
class Figure:
    """A picture that lies beside the page at `path`. `alt` says what it shows to those who cannot see it."""

    path: str
    alt: str
    caption: str = ""

    def __post_init__(self) -> None:
        _check_line("the path of a figure", self.path)
        _check_line("what a figure shows", self.alt)


@dataclass(frozen=True)
class Fact:
    """One figure at the top of a page: its value, what it is of, and how it was measured."""

    value: str
    what: str
    note: str = ""

    def __post_init__(self) -> None:
        _check_line("a fact", self.value)
        _check_line("what a fact is of", self.what)


@dataclass(frozen=True)
class Facts:
    """A few figures, shown large at the top of a page."""

    items: tuple[Fact, ...]


@dataclass(frozen=True, eq=False)
class Chart:
    """A picture that is drawn from values, with the same values as a table behind it.

    Args:
        name: Of its file or its place in the page: small letters, digits and hyphens.
        title: What it shows, in a few words.
        alt: What is to be seen, for those who cannot see it.
        panels: What is drawn.
        table: The figures.
        caption: How to read it.
        columns: Panels side by side, where there is room.
    """

    name: str
    title: str
    alt: str
    panels: tuple[Panel, ...]
    table: Table
    caption: str = ""
    columns: int = 1

    def __post_init__(self) -> None:
        _check_line("the title of a chart", self.title)
        _check_line("what a chart shows", self.alt)
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ValueError(f"the name of a chart has small letters, digits and hyphens, got {self.name!r}")
        if not self.panels or self.columns < 1:
            raise ValueError(f"the chart {self.name} needs at least one panel and one column")


@dataclass(frozen=True)
class _Titled:
    title: str
    blocks: tuple[Block, ...]

    called: ClassVar[str]

    def __post_init__(self) -> None:
        _check_line(f"the title of {self.called}", self.title)


class Folded(_Titled):
    """Blocks that are hidden until a reader opens them, under a title that is always shown."""

    called = "what is folded"


class Section(_Titled):
    """Blocks under a title; sections inside sections are one level lower."""

    called = "a section"


class Document(_Titled):
    """A whole report."""

    called = "a document"


def missing(what: str, command: str) -> Paragraph:
    """In place of a figure for which there is no file: the command that makes the file.

    Args:
        what: The figure, in a few words.
        command: What somebody types to make its file.
    """
    return Paragraph(
        f"Not in these files: {what}. To have it here: {code(command)}, and give its file to `blockcache report`."
    )


Block: TypeAlias = Paragraph | Bullets | Facts | Table | Figure | Chart | Folded | Section


def _check_line(what: str, text: str) -> None:
    if not text.strip() or "\n" in text:
        raise ValueError(f"{what} is one line of text, got {text!r}")


def in_words(block: Facts | Chart) -> tuple[Paragraph | Bullets | Table, ...]:
    """What is shown of it where nothing is drawn."""
    if isinstance(block, Facts):
        items = (f"**{one.value}** {one.what}" + f": {one.note}" * bool(one.note) for one in block.items)
        return (Bullets(tuple(items)),)
    return Paragraph(f"**{block.title}.** {block.caption}".rstrip()), block.table


def charts(blocks: Iterable[Block]) -> tuple[Chart, ...]:
    """All charts of a document, in the order in which they are read.

    Args:
        blocks: Those of the document, or of a part of it.
    """
    found: list[Chart] = []
    for block in blocks:
        if isinstance(block, Chart):
            found.append(block)
        elif isinstance(block, Section | Folded):
            found += charts(block.blocks)
    return tuple(found)
