"""Pictures by matplotlib, which is optional: a function draws a figure, and it is saved here. Knows nothing of what they show."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockcache.errors import FileError
from blockcache.extras import require
from blockcache.files import PathLike, write_bytes


def require_matplotlib() -> None:
    """Refuse before anything is measured what could not be drawn afterwards."""
    require("matplotlib", "plots", "a picture", error=FileError)


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
    """As an SVG or a PDF file if it is called so, else as a PNG file; all of it or none of it."""
    from matplotlib import rc_context

    buffer, kind = io.BytesIO(), os.fspath(path).rpartition(".")[2].lower()
    kind = kind if kind in _UNDATED else "png"
    with rc_context({"svg.hashsalt": "blockcache", "svg.fonttype": "none", "pdf.fonttype": 42}):  # text stays text
        figure.savefig(buffer, format=kind, dpi=130, metadata=_UNDATED.get(kind))
    write_bytes(path, buffer.getvalue())
