"""A document as one HTML page that needs nothing else: no network, no server, no file beside it.

Charts are drawn by plotly's script, which its Python package brings and which is written into the page. It was chosen over
Vega and Bokeh because heat maps with marks, intervals and logarithmic axes are one script of 4.8 MB without a compiler
of its own, because a value can be pointed at from the outside, as the arrow keys do, and because it draws SVG, which
prints sharply. What it draws is decided by `chart`; how, by assets/report/page.js. Knows nothing of what a document is about.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator
from importlib import resources

from blockcache._version import __version__
from blockcache.errors import FileError
from blockcache.report import chart as values
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
    charts,
    spans,
)
from blockcache_runtime.extras import require

MOST_BYTES = 8_000_000
"""Of a page: it is sent by mail and opened on a phone."""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""What the browser may load: nothing that does not stand in the page."""
_TAGS = {"code": "code", "strong": "strong", "emphasis": "em"}
_LONG = 48
"""Characters of a cell that is prose, and so may break into lines."""
_HINT = "Point at the figure, or focus it and use the arrow keys."


def require_plotly() -> None:
    """Refuse before anything is read what could not be drawn afterwards."""
    require("plotly", "report", "a page with figures", error=FileError, minimum=(6, 0))


def render(document: Document) -> str:
    """The whole page, below 8 MB."""
    require_plotly()
    from plotly.offline import get_plotlyjs

    script, style = _asset("page.js"), _asset("page.css")
    drawn = charts(document.blocks)
    doubled = {one.name for one in drawn if [other.name for other in drawn].count(one.name) > 1}
    if doubled:
        raise ValueError(f"two charts are called {min(doubled)}")
    text = _PAGE.format(
        title=html.escape(_words(document.title)),
        policy=_POLICY,
        style=style,
        heading=_inline(document.title),
        contents=_contents(document),
        body="\n".join(_blocks(document.blocks, 2)),
        version=html.escape(__version__),
        charts=_json(
            {
                "colours": values.COLOURS,
                "scale": values.SCALE,
                "markers": {name: shapes[1:] for name, shapes in values.MARKERS.items()},
                "charts": [{"name": one.name, "columns": one.columns, "panels": values.to_json(one.panels)} for one in drawn],
            }
        ),
        library=get_plotlyjs() if drawn else "",
        script=script,
    )  # fmt: skip
    if len(text.encode()) > MOST_BYTES:
        raise FileError(
            f"the page would have {len(text.encode()):,} bytes, expected {MOST_BYTES:,} at most; give it fewer files"
        )
    return text


def _asset(name: str) -> str:
    return resources.files("blockcache").joinpath("assets", "report", name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """JSON that cannot end the script element that it stands in, whatever its names are."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _contents(document: Document) -> str:
    titles = [block.title for block in document.blocks if isinstance(block, Section)]
    return "".join(f'<li><a href="#{_anchor(title)}">{_inline(title)}</a></li>' for title in titles)


def _anchor(title: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", _words(title).lower()).strip("-")
    return words or "section-" + hashlib.sha256(title.encode()).hexdigest()[:8]


def _blocks(blocks: Iterable[Block], level: int) -> Iterator[str]:
    for block in blocks:
        yield from _lines(block, level)


def _lines(block: Block, level: int) -> Iterator[str]:
    match block:
        case Paragraph(text):
            if text:
                yield f"<p>{_inline(text)}</p>"
        case Bullets(items):
            yield "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        case Facts(items):
            cards = (
                f"<div><dt>{_inline(fact.what)}</dt><dd>{_inline(fact.value)}</dd><dd>{_inline(fact.note)}</dd></div>"
                for fact in items
            )
            yield f'<dl class="facts">{"".join(cards)}</dl>'
        case Table():
            yield _table(block)
        case Figure(path, alt, caption):
            yield f'<figure><img src="{html.escape(path)}" alt="{html.escape(alt)}"><figcaption>{_inline(caption)}</figcaption></figure>'
        case Chart():
            yield from _chart(block)
        case Folded(title, blocks):
            yield f"<details><summary>{_inline(title)}</summary>"
            yield from _blocks(blocks, level)
            yield "</details>"
        case Section(title, blocks):
            yield f'<section aria-labelledby="{_anchor(title)}"><h{level} id="{_anchor(title)}">{_inline(title)}</h{level}>'
            yield from _blocks(blocks, min(level + 1, 6))
            yield "</section>"


def _chart(block: Chart) -> Iterator[str]:
    alt = html.escape(f"{block.alt} Arrow keys go from value to value.")
    yield f'<figure class="chart" id="figure-{block.name}">'
    yield f"<figcaption><strong>{_inline(block.title)}</strong> {_inline(block.caption)}</figcaption>"
    yield '<ul class="legend"></ul>'
    yield (
        f'<div class="plot" data-chart="{block.name}" tabindex="0" role="application" aria-roledescription="figure" '
        f'aria-label="{alt}"></div>'
    )
    yield f'<output class="readout">{_HINT}</output>'
    yield f"<details><summary>The figures as a table</summary>{_table(block.table)}</details></figure>"


def _table(table: Table) -> str:
    wide = [any(len(row[place]) > _LONG for row in table.rows) for place in range(len(table.columns))]
    sides = [
        ' class="number"' if column.align == "right" else ' class="prose"' if long else ""
        for column, long in zip(table.columns, wide, strict=True)
    ]
    head = _cells("th", ' scope="col"', [column.name for column in table.columns], sides)
    rows = "".join(f"<tr>{_cells('td', '', row, sides)}</tr>" for row in table.rows)
    caption = f"<caption>{_inline(table.caption)}</caption>" if table.caption else ""
    return (
        f'<div class="scrolled" tabindex="0" role="region" aria-label="table"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cells(tag: str, kind: str, cells: Iterable[str], sides: Iterable[str]) -> str:
    return "".join(f"<{tag}{kind}{side}>{_inline(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True))


def _inline(text: str) -> str:
    """Marked-up text; every word of it escaped. A link leads out of the page only where somebody follows it."""
    parts = []
    for span in spans(text):
        words = html.escape(span.text)
        if span.kind == "link":
            safe = span.address if span.address.startswith(("https://", "#")) else ""
            words = f'<a href="{html.escape(safe)}" rel="noreferrer">{words}</a>' if safe else words
        tag = _TAGS.get(span.kind)
        parts.append(f"<{tag}>{words}</{tag}>" if tag else words)
    return "".join(parts)


def _words(text: str) -> str:
    return "".join(span.text for span in spans(text))


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="blockcache {version}">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<a class="skip" href="#content">To the content</a>
<header>
<h1>{heading}</h1>
<button type="button" id="theme" aria-pressed="false">Dark</button>
<nav aria-label="Sections"><ul>{contents}</ul></nav>
</header>
<main id="content">
{body}
</main>
<footer><p>Made by blockcache {version}. This file needs no network and sends nothing.</p></footer>
<noscript><p>The figures are drawn by a script, which is switched off; each has its numbers in a table.</p></noscript>
<script type="application/json" id="charts">{charts}</script>
<script>{library}</script>
<script>
{script}
</script>
</body>
</html>
"""
