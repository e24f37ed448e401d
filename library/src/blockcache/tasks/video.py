"""Rollouts of the same episode side by side, as a GIF or an MP4, written by imageio. Knows nothing of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import FileError
from blockcache.extras import require
from blockcache.files import PathLike, write_bytes

Frame: TypeAlias = npt.NDArray[np.uint8]  # (height, width, 3)
HEIGHT, RATE, CAPTION = 256, 10, 18  # pixels, frames per second, pixels
# By the end of a file's name, imageio's plugin, the module that it needs, and its settings.
_FORMATS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    ".gif": ("pillow", "PIL", {"duration": 1000 // RATE, "loop": 0}),
    ".mp4": ("FFMPEG", "imageio_ffmpeg", {"fps": RATE, "macro_block_size": 2}),
}


def check_video(path: PathLike) -> None:
    """Refuse a kind of video that cannot be written here, before any work is done for it.

    Args:
        path: Where the video shall be.
    """
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise FileError(f"a video is a .gif or a .mp4 file, got {path}")
    for module in ("imageio", "PIL", _FORMATS[suffix][1]):  # captions are drawn by Pillow
        require(module, "video", f"a {suffix} video", error=FileError)


def write_video(path: PathLike, films: Mapping[str, Sequence[Frame]]) -> None:
    """Films next to one another, each under its caption; one that ends early stays on its last picture.

    Args:
        path: Where the video shall be; how it ends says which format it has.
        films: The pictures of each film, by its caption.
    """
    check_video(path)
    import imageio.v3 as imageio

    longest = max(len(film) for film in films.values())
    pictures = []
    for moment in range(longest):
        frames = [_captioned(film[min(moment, len(film) - 1)], caption) for caption, film in films.items()]
        pictures.append(np.concatenate(frames, axis=1))
    suffix = Path(path).suffix
    plugin, _, settings = _FORMATS[suffix]
    try:
        data = imageio.imwrite("<bytes>", np.stack(pictures), extension=suffix, plugin=plugin, **settings)
    except (OSError, RuntimeError) as error:  # imageio-ffmpeg finds no ffmpeg, or one that cannot do it
        raise FileError(f"a {suffix} video cannot be written here ({error}); ask for a .gif") from error
    write_bytes(path, data)


def _captioned(frame: Frame, caption: str) -> Frame:
    from PIL import Image, ImageDraw

    height, width, _ = frame.shape
    picture = Image.fromarray(frame).resize((2 * round(width * HEIGHT / height / 2), HEIGHT))  # MP4 wants even sizes
    page = Image.new("RGB", (picture.width, HEIGHT + CAPTION), "white")
    page.paste(picture, (0, CAPTION))
    ImageDraw.Draw(page).text((4, 3), caption, fill="black")
    return np.asarray(page, dtype=np.uint8)
