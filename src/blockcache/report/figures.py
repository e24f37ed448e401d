"""Pictures by matplotlib, which is optional: a function draws a figure, and it is saved here. Knows nothing of what they show."""

from __future__ import annotations

import io
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


def save_figure(figure: Any, path: PathLike) -> None:
    """As a PNG file, all of it or none of it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_bytes(path, buffer.getvalue())
