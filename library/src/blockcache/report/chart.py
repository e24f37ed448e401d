"""What a chart shows, as values: panels of heat maps with marks upon them, series of points or lines, and bars.

Drawn by `drawing` for paper and by the page's own script on a screen, both with the colours and the shapes of `palette`.
Knows nothing of pages, of matplotlib or of what the figures mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockcache.palette import Colour, Marker

SCALE = ("#440154", "#472D7B", "#3B528B", "#2C728E", "#21918C", "#28AE80", "#5EC962", "#ADDC30", "#FDE725")
"""Viridis, from low to high: rises in lightness all the way, so that it is read without colours too."""
MOST_CELLS = 250_000
"""Of one heat map: a page has several, and must stay small."""


@dataclass(frozen=True)
class Axis:
    """`names` are those of the places 0, 1, and so on; without them the axis has numbers."""

    title: str
    log: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Marks:
    """Cells of a heat map, (row, column), that are marked, such as updates."""

    name: str
    cells: tuple[tuple[int, int], ...]
    colour: Colour = "ink"
    marker: Marker = "circle"


@dataclass(frozen=True, eq=False)
class HeatMap:
    """`values` (rows, columns); NaN is a cell without a figure. Row 0 stands at the top.

    Args:
        what: The figure in a cell.
        low, high: Ends of the colours.
        rest: What a cell is that no mark names; nothing where there are no marks.
        every: Columns and rows stand for so many steps each, the first of them written down.
    """

    values: NDArray[np.float64]
    what: str
    low: float
    high: float
    marks: tuple[Marks, ...] = ()
    rest: str = ""
    every: int = 1

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or not 0 < self.values.size <= MOST_CELLS:
            raise ValueError(f"a heat map has rows and columns, {MOST_CELLS:,} cells at most, got {self.values.shape}")
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError(f"the ends of a heat map's colours are finite, got {self.low} and {self.high}")
        rows, columns = self.values.shape
        for mark in self.marks:
            if any(not (0 <= row < rows and 0 <= column < columns) for row, column in mark.cells):
                raise ValueError(f"a mark {mark.name!r} lies outside of the {rows} x {columns} cells")


@dataclass(frozen=True)
class Series:
    """Points, a line, or both. `low` and `high` are the ends of each point's interval; `notes` what else is known of it;
    `labels` the words beside a point, which few should have."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    colour: Colour = "blue"
    marker: Marker = "circle"
    line: bool = False
    points: bool = True
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    hollow: bool = False
    large: bool = False

    def __post_init__(self) -> None:
        for name in ("y", "low", "high", "notes", "labels"):
            found = getattr(self, name)
            if len(found) != len(self.x) and (found or name == "y"):
                raise ValueError(f"{self.name}: {len(found)} {name} for {len(self.x)} points")
        if not all(map(math.isfinite, (*self.x, *self.y, *self.low, *self.high))):
            raise ValueError(f"{self.name}: every point needs finite numbers")


@dataclass(frozen=True)
class Bars:
    """One bar for each name of the panel's y axis, from the top; `colours` and `notes` one for each. Beside a bar stands its
    value in that `form`, or what is `shown` instead."""

    name: str
    values: tuple[float, ...]
    colours: tuple[Colour, ...]
    notes: tuple[str, ...]
    form: str = "{:.1f}"
    shown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shown", self.shown or tuple(map(self.form.format, self.values)))
        if not len(self.values) == len(self.colours) == len(self.notes) == len(self.shown):
            raise ValueError(f"{self.name}: values, colours, notes and words must be equally many")
        if not all(map(math.isfinite, self.values)):
            raise ValueError(f"{self.name}: every bar needs a finite number")


@dataclass(frozen=True)
class Rule:
    """A thin line across a panel, at that place of its x or y axis."""

    axis: Literal["x", "y"]
    at: float
    name: str


Layer: TypeAlias = HeatMap | Series | Bars


@dataclass(frozen=True, eq=False)
class Panel:
    """One pair of axes and what is drawn in it. `square` keeps both as long as one another."""

    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    title: str = ""
    rules: tuple[Rule, ...] = ()
    square: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a panel shows something, got no layer")


_KINDS = {HeatMap: "heat", Series: "series", Bars: "bars"}


def to_json(value: Any) -> Any:
    """Panels and what they hold in JSON types, for the page's script: an object for each value, with its fields, and a
    layer's `kind`. Six digits are more than anybody sees; None stands for NaN, which JSON does not have."""
    if is_dataclass(value):
        kind = {"kind": _KINDS[type(value)]} if isinstance(value, Layer) else {}
        return kind | {item.name: to_json(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return [to_json(item) for item in value] if isinstance(value, tuple | np.ndarray) else value
