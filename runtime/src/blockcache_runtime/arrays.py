"""Anything that numpy reads as numbers, as a float32 array; what is no number, not finite or absurdly large is refused.

A camera's frames are bytes, or fractions from 0 to 1.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache_runtime.errors import ObservationError
from blockcache_runtime.finite import check_input
from blockcache_runtime.frames import BYTE, check_frames

Array: TypeAlias = npt.NDArray[np.float32]


def read_array(value: Any, what: str) -> Array:
    """`value` as float32, contiguous. `what` names it in an error: an observation, or "noise"."""
    array = _numbers(value, what)
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
            array = np.asarray(array, dtype=np.float32, order="C")
    check_input(largest(array), what)
    return array


def read_frames(value: Any, what: str, expected: tuple[int, ...]) -> Array:
    """A camera's frames, (batch, *expected), as float32 from 0 to 1: bytes of the camera, or that already."""
    array = _numbers(value, what)
    check_frames(what, array.shape, str(array.dtype), expected, lambda: (float(array.min()), float(array.max())))
    frames = np.asarray(array, dtype=np.float32, order="C")
    return frames / np.float32(BYTE) if array.dtype == np.uint8 else frames


def _numbers(value: Any, what: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)  # a torch tensor answers this too
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ObservationError(f"{what} is not an array of numbers: {reason}") from error
    if array.dtype.kind not in "fiub":
        raise ObservationError(f"{what} is not an array of numbers: its type is {array.dtype}")
    return array


def largest(array: Array) -> float:
    """The largest magnitude; NaN if one of the values is."""
    return float(np.abs(array).max(initial=0.0))
