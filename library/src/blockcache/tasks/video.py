"""Two rollouts of the same episode side by side, as a GIF (Pillow) or an MP4 (OpenCV). Knows nothing of policies."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import FileError
from blockcache.extras import require
from blockcache.files import PathLike, write_bytes

Frame: TypeAlias = npt.NDArray[np.uint8]  # (height, width, 3)
HEIGHT, RATE, CAPTION = 256, 10, 18  # pixels, frames per second, pixels
_NEEDS = {".gif": ("PIL", "plots"), ".mp4": ("cv2", "pusht")}


def check_video(path: PathLike) -> None:
    """Refuse a kind of video that cannot be written here, before any work is done for it."""
    suffix = Path(path).suffix
    if suffix not in _NEEDS:
        raise FileError(f"a video is a .gif or a .mp4 file, got {path}")
    for module, extra in (_NEEDS[suffix], _NEEDS[".gif"]):  # captions are Pillow's
        require(module, extra, f"a {suffix} video", error=FileError)


def write_video(path: PathLike, films: Mapping[str, Sequence[Frame]]) -> None:
    """Films by their captions, next to one another; one that ends early stays on its last picture."""
    check_video(path)
    longest = max(len(film) for film in films.values())
    pictures = [
        np.concatenate(
            [_captioned(film[min(moment, len(film) - 1)], caption) for caption, film in films.items()], axis=1
        )
        for moment in range(longest)
    ]
    write_bytes(path, _gif(pictures) if Path(path).suffix == ".gif" else _mp4(pictures))


def _captioned(frame: Frame, caption: str) -> Frame:
    from PIL import Image, ImageDraw

    height, width, _ = frame.shape
    picture = Image.fromarray(frame).resize((2 * round(width * HEIGHT / height / 2), HEIGHT))  # MP4 wants even sizes
    page = Image.new("RGB", (picture.width, HEIGHT + CAPTION), "white")
    page.paste(picture, (0, CAPTION))
    ImageDraw.Draw(page).text((4, 3), caption, fill="black")
    return np.asarray(page, dtype=np.uint8)


def _gif(pictures: Sequence[Frame]) -> bytes:
    from PIL import Image

    first, *others = (Image.fromarray(picture) for picture in pictures)
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=1000 // RATE, loop=0)
    return buffer.getvalue()


def _mp4(pictures: Sequence[Frame]) -> bytes:
    import cv2

    height, width, _ = pictures[0].shape
    with tempfile.TemporaryDirectory() as directory:  # OpenCV writes to files only
        file = Path(directory) / "film.mp4"
        film = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"mp4v"), RATE, (width, height))
        for picture in pictures:
            film.write(np.ascontiguousarray(picture[..., ::-1]))  # it wants blue first
        film.release()
        if not file.exists() or not file.stat().st_size:
            raise FileError("OpenCV cannot write MP4 here; ask for a .gif")
        return file.read_bytes()
