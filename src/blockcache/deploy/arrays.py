"""Anything that numpy reads as numbers, as a float32 array; what is no number, not finite or absurdly large is refused."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import ObservationError
from blockcache.finite import check_input

Array: TypeAlias = npt.NDArray[np.float32]


def read_array(value: Any, what: str) -> Array:
    """`value` as float32, contiguous. `what` names it in an error: an observation, or "noise"."""
    try:
        array = np.asarray(value)  # a torch tensor answers this too
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ObservationError(f"{what} is not an array of numbers: {reason}") from error
    if array.dtype.kind not in "fiub":
        raise ObservationError(f"{what} is not an array of numbers: its type is {array.dtype}")
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
            array = np.asarray(array, dtype=np.float32, order="C")
    check_input(largest(array), what)
    return array


def largest(array: Array) -> float:
    """The largest magnitude; NaN if one of the values is."""
    return float(np.abs(array).max(initial=0.0))
