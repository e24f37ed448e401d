"""Colours and shapes by name, the same on every page and in every picture. Knows nothing of what they stand for."""

from __future__ import annotations

from typing import Literal, TypeAlias

Colour: TypeAlias = Literal["ink", "orange", "blue", "green", "sky", "pink", "amber", "grey"]
Marker: TypeAlias = Literal["circle", "square", "diamond", "up", "down", "cross", "x", "star"]

COLOURS: dict[Colour, str | None] = {  # Okabe and Ito's, for every eye; ink is that of the text, dark or light
    "ink": None,
    "orange": "#D55E00",
    "blue": "#0072B2",
    "green": "#009E73",
    "sky": "#56B4E9",
    "pink": "#CC79A7",
    "amber": "#E69F00",
    "grey": "#8A8A8A",
}
MARKERS: dict[Marker, tuple[str, str, str]] = {  # for matplotlib, for the page's script, and in its legend
    "circle": ("o", "circle", "●"),
    "square": ("s", "square", "■"),
    "diamond": ("D", "diamond", "◆"),
    "up": ("^", "triangle-up", "▲"),
    "down": ("v", "triangle-down", "▼"),
    "cross": ("P", "cross", "✚"),
    "x": ("X", "x", "✖"),
    "star": ("*", "star", "★"),
}
