"""Messages as they are on the wire: msgpack with arrays in it, in the two dialects that robots' clients speak.

Nothing that is received runs code or becomes larger than a message may be: an array must be exactly as long as its type and
shape say, objects and complex numbers are no types, lists and maps are counted, and the size of a picture is looked at
before it is unpacked. Knows nothing of policies and sockets.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from blockcache_runtime.errors import ContentError, in_one_line, short

MOST_ITEMS, MOST_CONTAINERS, MOST_AXES = 4096, 512, 8
"""Of one list or map; lists and maps in one message; axes of an array: far more than any observation has."""
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")


def unpack(data: bytes, most_pixels: int) -> dict[str, Any]:
    """A message of either dialect: a map whose names are texts, with arrays as numpy's; otherwise a ContentError.

    Args:
        data: The message.
        most_pixels: Numbers that a packed picture may have once it is unpacked.
    """
    containers = itertools.count(1)

    def counted(items: Any) -> Any:
        if next(containers) > MOST_CONTAINERS:
            raise ContentError(f"the message has more than {MOST_CONTAINERS} lists and maps")
        return items

    try:
        found = msgpack.unpackb(  # which calls the hooks from the inside out
            data,
            object_hook=lambda given: _map(counted(given), most_pixels),
            list_hook=counted,
            raw=False,
            strict_map_key=True,  # texts or bytes: other keys may be slow to hash
            max_array_len=MOST_ITEMS,
            max_map_len=MOST_ITEMS,
            max_ext_len=0,
        )
    except ContentError:
        raise
    except Exception as error:  # msgpack's errors, ValueError, RecursionError, UnicodeDecodeError
        raise ContentError(f"the message is not msgpack ({in_one_line(error)})") from error
    if not isinstance(found, dict):
        raise ContentError(f"the message is a {type(found).__name__}, expected a map")
    return found


def _map(given: dict[Any, Any], most_pixels: int) -> Any:
    """A map of texts, or the array, number or picture that it describes."""
    named = {_text(key): value for key, value in given.items()}
    if len(named) < len(given):
        raise ContentError("a map has the same name twice, as text and as bytes")
    if "__ndarray__" in named:
        return _array(named)
    if "__npgeneric__" in named:
        return _scalar(named)
    if "__image__" in named:
        return _array(named) if str(named.get("format")) == "raw" else _picture(named, most_pixels)
    return named


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _dtype(named: Mapping[str, Any]) -> np.dtype[Any]:
    name = named.get("dtype")
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ContentError(f"an array has the type {short(name)}, expected plain numbers such as '<f4' or '|u1'")
    return np.dtype(name)


def _array(named: Mapping[str, Any]) -> npt.NDArray[Any]:
    dtype, data, shape = _dtype(named), named.get("data"), named.get("shape")
    plain = isinstance(shape, list | tuple) and len(shape) <= MOST_AXES
    if not plain or not all(type(size) is int and 0 <= size < 2**32 for size in shape or ()):
        raise ContentError(f"an array has the shape {short(shape)}, expected up to {MOST_AXES} sizes")
    if not isinstance(data, bytes) or len(data) != math.prod(shape or ()) * dtype.itemsize:
        got = f"{len(data):,} bytes" if isinstance(data, bytes) else type(data).__name__
        raise ContentError(f"an array of {dtype} and shape {tuple(shape or ())} cannot be made of {got}")
    return np.frombuffer(data, dtype=dtype).reshape(tuple(shape or ()))


def _scalar(named: Mapping[str, Any]) -> npt.NDArray[Any]:
    value = named.get("data")
    if not isinstance(value, bool | int | float):
        raise ContentError(f"a number is {short(value)}")
    try:
        return np.asarray(value, dtype=_dtype(named))
    except (OverflowError, ValueError) as error:
        raise ContentError(f"a number does not fit its type: {error}") from error


def _picture(named: Mapping[str, Any], most_pixels: int) -> npt.NDArray[np.uint8]:
    """(height, width, channels) of a PNG or JPEG; its size is known, and checked, before it is unpacked."""
    kind, data = named.get("format"), named.get("data")
    if not isinstance(kind, str) or kind not in ("png", "jpeg") or not isinstance(data, bytes):
        raise ContentError(f"a picture has the format {short(kind)}, expected 'png', 'jpeg' or 'raw'")
    try:
        from PIL import Image
    except ImportError as error:
        raise ContentError(
            "a picture came as PNG or JPEG, which needs Pillow on the server; install pillow there, or have the client send "
            "raw pictures"
        ) from error
    try:
        with Image.open(io.BytesIO(data), formats=(kind.upper(),)) as picture:
            width, height = picture.size
            if picture.mode not in ("L", "RGB", "RGBA") or width * height * len(picture.mode) > most_pixels:
                raise ContentError(
                    f"a picture has {width} x {height} pixels of {picture.mode}, more than a camera sends"
                )
            pixels = np.asarray(picture)
    except ContentError:
        raise
    except Exception as error:  # Pillow raises a dozen kinds about bytes that are no picture
        raise ContentError(f"a picture cannot be read ({in_one_line(error)})") from error
    return pixels[..., None] if pixels.ndim == 2 else pixels


def pack(value: Any, bytes_keys: bool) -> bytes:
    """A message of plain values and arrays.

    Args:
        value: A map.
        bytes_keys: Whether the words that describe an array are bytes, as openpi has it, or texts, as vla-eval has it.
    """

    def described(item: Any) -> Any:
        if not isinstance(item, np.ndarray):
            raise TypeError(f"{type(item).__name__} cannot be sent")
        words = {"__ndarray__": True, "data": item.tobytes(), "dtype": item.dtype.str, "shape": list(item.shape)}
        return {name.encode(): value for name, value in words.items()} if bytes_keys else words

    return bytes(msgpack.packb(value, default=described))
