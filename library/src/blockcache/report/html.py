"""A document as one HTML page that needs nothing else: no network, no server, no file beside it.

Charts are drawn by plotly's script, which its Python package brings and which is written into the page. It was chosen over
Vega and Bokeh because heat maps with marks, intervals and logarithmic axes are one script of 4.8 MB without a compiler
of its own, because a value can be pointed at from the outside, as the arrow keys do, and because it draws SVG, which
prints sharply. What it draws is decided by `chart`; how, by assets/report/page.js. The page itself is the template
assets/report/page.html. Knows nothing of what a document is about.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from importlib import resources

from jinja2 import Environment, StrictUndefined

from blockcache import palette
from blockcache._version import __version__
from blockcache.errors import FileError
from blockcache.extras import require
from blockcache.report import chart as values
from blockcache.report.document import Document, Table, charts, spans

MOST_BYTES = 8_000_000
"""The largest page: it may be sent by mail and opened on a phone."""
_LONG = 48
"""Cells with more characters than this are prose, and may break into lines."""


def require_plotly() -> None:
    """Refuse before anything is read what could not be drawn afterwards."""
    require("plotly", "report", "a page with figures", error=FileError, minimum=(6, 0))


def render(document: Document) -> str:
    """The whole page, below 8 MB.

    Args:
        document: What it says; names of charts must differ.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs

    drawn = charts(document.blocks)
    name, count = Counter(one.name for one in drawn).most_common(1)[0] if drawn else ("", 0)
    if count > 1:
        raise ValueError(f"two charts are called {name}")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    text = environment.from_string(_asset("page.html")).render(
        document=document,
        spans=spans,
        words=_words,
        anchor=_anchor,
        column_classes=_column_classes,
        kind_of=lambda block: type(block).__name__,
        version=__version__,
        style=_asset("page.css"),
        script=_asset("page.js"),
        library=get_plotlyjs() if drawn else "",
        charts={
            "colours": palette.COLOURS,
            "scale": values.SCALE,
            "markers": {name: shapes[1:] for name, shapes in palette.MARKERS.items()},
            "charts": [
                {"name": one.name, "columns": one.columns, "panels": values.to_json(one.panels)} for one in drawn
            ],
        },
    )
    if len(text.encode()) > MOST_BYTES:
        raise FileError(
            f"the page would have {len(text.encode()):,} bytes, expected {MOST_BYTES:,} at most; give it fewer files"
        )
    return text


def _asset(name: str) -> str:
    return resources.files("blockcache").joinpath("assets", "report", name).read_text(encoding="utf-8")


def _anchor(title: str) -> str:
    """What a link to a section is called."""
    name = re.sub(r"[^a-z0-9]+", "-", _words(title).lower()).strip("-")
    return name or "section-" + hashlib.sha256(title.encode()).hexdigest()[:8]


def _words(text: str) -> str:
    return "".join(span.text for span in spans(text))


def _column_classes(table: Table) -> list[str]:
    """How the cells of each column are set: numbers on the right, prose in several lines."""
    long = [any(len(row[place]) > _LONG for row in table.rows) for place in range(len(table.columns))]
    return [
        "number" if column.align == "right" else "prose" if is_long else ""
        for column, is_long in zip(table.columns, long, strict=True)
    ]
