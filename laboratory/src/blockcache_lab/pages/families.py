"""The table of docs/generated/families.md: which policies are accepted, and by which engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from blockcache.report.document import Table, plain, table


def families_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Of records with policy, family, blocks and engines (by name, a word or two each)."""
    found = list(rows)
    engines = list(found[0]["engines"]) if found else []
    cells = [
        [
            *(plain(row[name]) for name in ("policy", "family", "blocks")),
            *(plain(row["engines"][name]) for name in engines),
        ]
        for row in found
    ]
    return table(["policy", "family", "blocks of a layer", *engines], cells, left=3 + len(engines))
