"""Markdown from plain rows."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, first column to the left, the others to the right."""
    lines = [_line(header), _line(["---", *["---:"] * (len(header) - 1)]), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
