"""A chart by matplotlib, which is optional, for a paper: the same values, colours and shapes as on the page.

Knows nothing of what they mean.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockcache.errors import FileError
from blockcache.extras import require
from blockcache.files import PathLike, write_bytes
from blockcache.palette import COLOURS, MARKERS
from blockcache.report.chart import SCALE, Bars, HeatMap, Panel, Series
from blockcache.report.document import Chart

_INK = "#000000"


def require_matplotlib() -> None:
    """Refuse before anything is measured what could not be drawn afterwards."""
    require("matplotlib", "plots", "a picture", error=FileError)


def save_charts(charts: Iterable[Chart], directory: Path) -> list[Path]:
    """An SVG and a PDF of each chart, called after it.

    Args:
        charts: Those to draw; their names differ.
        directory: An existing one.
    """
    paths = []
    for chart in charts:
        figure = draw(chart)
        figure.draw_without_rendering()  # places are found once for all kinds of files: that is what takes long
        figure.set_layout_engine("none")
        for kind in ("svg", "pdf"):
            paths.append(directory / f"{chart.name}.{kind}")
            save_figure(figure, paths[-1])
    return paths


def draw(chart: Chart) -> Any:
    """The whole chart: its panels in as many columns as it asks for, one legend beneath.

    Args:
        chart: What to draw.
    """
    columns = min(chart.columns, len(chart.panels))
    width = {1: 8.0, 2: 5.6, 3: 4.0}.get(columns, 1.5)
    return draw_panels(chart.panels, columns, width, max(_height(panel, width) for panel in chart.panels))


def draw_panels(panels: Sequence[Panel], columns: int, width: float, height: float) -> Any:
    """Panels of so many inches side by side, one legend beneath.

    Args:
        panels: What to draw, row by row.
        columns: Panels side by side.
        width: Of one panel, in inches.
        height: Of one panel, in inches.
    """
    rows = -(-len(panels) // columns)
    figure = new_figure(columns * width, rows * height + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    small = columns > 3
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, small)
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 2 * columns + 2), frameon=False, fontsize=8)  # fmt: skip
    return figure


def _height(panel: Panel, width: float) -> float:
    if panel.square:
        return width
    rows = len(panel.y.names)
    return max(1.2, (0.13 if rows > 40 else 0.2) * rows) + 0.7 if rows else 0.7 * width


def _draw_panel(axes: Any, panel: Panel, small: bool) -> None:
    from matplotlib.ticker import NullLocator

    size = 6 if small else 8
    axes.set_title(panel.title.replace("$", r"\$"), fontsize=size + 1, loc="left")
    axes.tick_params(labelsize=size - 1)
    if not small:
        axes.set_xlabel(panel.x.title.replace("$", r"\$"), fontsize=size)
        axes.set_ylabel("" if panel.y.names else panel.y.title.replace("$", r"\$"), fontsize=size)
    labels: list[Label] = []
    for layer in panel.layers:
        match layer:
            case HeatMap():
                _draw_heat(axes, layer, bool(panel.y.names), small)
            case Series():
                labels += _draw_series(axes, layer)
            case Bars():
                _draw_bars(axes, layer)
    for name, axis in (("x", panel.x), ("y", panel.y)):
        if axis.log:
            getattr(axes, f"set_{name}scale")("log")
            ticks = log_ticks(_positive(panel, name))
            getattr(axes, f"set_{name}ticks")(ticks, [f"{tick:g}" for tick in ticks])
            getattr(axes, f"{name}axis").set_minor_locator(NullLocator())
        if axis.names:
            shown = [word.replace("$", r"\$") for word in axis.names]
            getattr(axes, f"set_{name}ticks")(range(len(shown)), shown, fontsize=5 if len(shown) > 40 else size - 1)
    for rule in panel.rules:
        line = axes.axvline if rule.axis == "x" else axes.axhline
        line(rule.at, color=_INK, lw=0.7, ls=":" if rule.name else "-", label=rule.name or None)
    if not any(isinstance(layer, HeatMap) for layer in panel.layers):
        axes.spines[["top", "right"]].set_visible(False)
    if labels:
        axes.margins(x=0.05 if len(labels) < 4 else 0.2)  # room for many names
        write_labels(axes, labels)


def _positive(panel: Panel, name: str) -> list[float]:
    """The values that decide where a logarithmic axis has its ticks."""
    found = [value for layer in panel.layers if isinstance(layer, Series) for value in getattr(layer, name)]
    found += [value for layer in panel.layers if isinstance(layer, Bars) for value in layer.values]
    return [value for value in found if value > 0]


def _draw_heat(axes: Any, heat: HeatMap, named: bool, small: bool) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns = heat.values.shape
    every, down = heat.every, 1 if named else heat.every
    # the first row stands at the top
    extent = (-0.5 * every, (columns - 0.5) * every, (rows - 0.5) * down, -0.5 * down)
    colours = LinearSegmentedColormap.from_list("page", list(SCALE))
    picture = axes.imshow(
        np.ma.masked_invalid(heat.values), cmap=colours, vmin=heat.low, vmax=heat.high, extent=extent, aspect="auto", interpolation="nearest"
    )  # fmt: skip
    for mark in heat.marks:
        where = np.array(mark.cells, dtype=float).reshape(-1, 2)
        face = "#ffffff" if mark.colour == "ink" else COLOURS[mark.colour]
        size = 5.0 if mark.marker == "down" else max(1.5, min(4.0, 300 / columns))
        style = {"color": face, "mec": _INK, "mew": 0.3, "ms": size, "ls": "", "label": mark.name}
        axes.plot(where[:, 1], where[:, 0], MARKERS[mark.marker][0], **style)
    if not small:
        axes.figure.colorbar(picture, ax=axes, shrink=0.9, pad=0.01).set_label(heat.what, fontsize=7)


def _draw_series(axes: Any, series: Series) -> list[Label]:
    colour = COLOURS[series.colour] or _INK
    style = {
        "color": colour,
        "marker": MARKERS[series.marker][0] if series.points else "",
        "ls": ("--" if series.hollow else "-") if series.line else "",
        "ms": 11 if series.large else 5,
        "mfc": "white" if series.hollow else colour,
        "lw": 1.2,
        "zorder": 3 if series.hollow else 2,
        "label": series.name,
    }
    if series.low and any(high > low for low, high in zip(series.low, series.high, strict=True)):
        y = np.array(series.y)
        ends = np.abs(np.array([y - np.array(series.low), np.array(series.high) - y]))
        axes.errorbar(series.x, y, yerr=ends, elinewidth=0.7, capsize=1.5, **style)
    else:
        axes.plot(series.x, series.y, **style)
    return [Label(word, x, y, colour) for word, x, y in zip(series.labels, series.x, series.y, strict=False) if word]


def _draw_bars(axes: Any, bars: Bars) -> None:
    places = range(len(bars.values))
    axes.barh(places, bars.values, color=[COLOURS[colour] or _INK for colour in bars.colours], height=0.7)
    axes.invert_yaxis()
    for place, value, word in zip(places, bars.values, bars.shown, strict=True):
        axes.annotate(word, (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.margins(x=0.12)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches. It needs no screen and leaves nothing open behind it."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@dataclass(frozen=True)
class Label:
    """A name beside a point, in data coordinates."""

    text: str
    x: float
    y: float
    colour: str = "black"


def write_labels(axes: Any, labels: Sequence[Label], size: float = 7.0) -> None:
    """Names beside their points, none upon another or upon a point: each takes the nearest free place, with a thin line back
    to its point where that is further away. Called last, when the axes have their final limits."""
    axes.figure.draw_without_rendering()  # places are known once the layout is
    points = [tuple(axes.transData.transform((label.x, label.y)) * 72 / axes.figure.dpi) for label in labels]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    for label, (x, y) in zip(labels, points, strict=True):
        wide, high = 0.55 * size * len(label.text), 1.1 * size
        left_of = {1: 0.0, 0: wide / 2, -1: wide}  # how much of the text stands left of where it is anchored
        places = (
            (right * reach - left_of[right], up * reach - high / 2)
            for reach in (7, 12, 18, 26, 36, 48, 62, 78)
            for right, up in ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1.3), (0, -1.3))
        )
        boxes = ((dx, dy, (x + dx, y + dy, x + dx + wide, y + dy + high)) for dx, dy in places)
        free = (place for place in boxes if not any(_overlap(place[2], other) for other in taken))
        dx, dy, box = next(free, (7.0, -high / 2, (x, y, x, y)))
        taken.append(box)
        far = abs(dx) > 14 or abs(dy + high / 2) > 14
        axes.annotate(
            label.text, (label.x, label.y), xytext=(dx, dy), textcoords="offset points", fontsize=size,
            color=label.colour, arrowprops={"arrowstyle": "-", "lw": 0.4, "color": label.colour} if far else None,
        )  # fmt: skip


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def log_ticks(values: Sequence[float]) -> list[float]:
    """Round numbers for a logarithmic axis with these values: 1, 2 and 5 of every decade, or 1 alone of very many."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    every = [
        round(step * 10.0**power, 12)
        for power in range(low, high + 1)
        for step in ((1, 2, 5) if high - low < 4 else (1,))
    ]
    return [tick for tick in every if min(values) / 1.4 <= tick <= max(values) * 1.3]


_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""The same figure gives the same file, whenever it is drawn."""


def save_figure(figure: Any, path: PathLike) -> None:
    """As an SVG or a PDF file if it is called so, else as a PNG file; all of it or none of it.

    Args:
        figure: A matplotlib figure.
        path: Where to write it; its ending says the format.
    """
    from matplotlib import rc_context

    buffer, kind = io.BytesIO(), os.fspath(path).rpartition(".")[2].lower()
    kind = kind if kind in _UNDATED else "png"
    with rc_context({"svg.hashsalt": "blockcache", "svg.fonttype": "none", "pdf.fonttype": 42}):  # text stays text
        figure.savefig(buffer, format=kind, dpi=130, metadata=_UNDATED.get(kind))
    write_bytes(path, buffer.getvalue())
