"""Anything that numpy reads as numbers, as a float32 array; what is no number or not finite is refused."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import ObservationError

Array: TypeAlias = npt.NDArray[np.float32]
SENSOR = "check the sensor before asking for an action"


def read_array(value: Any, what: str, hint: str) -> Array:
    """`value` as float32, contiguous. `what` names it in an error, `hint` says what to do where it is not finite."""
    try:
        array = np.asarray(value)  # a torch tensor answers this too
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ObservationError(f"{what} is not an array of numbers: {reason}") from error
    if array.dtype.kind not in "fiub":
        raise ObservationError(f"{what} is not an array of numbers: its type is {array.dtype}")
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
        array = np.asarray(array, dtype=np.float32, order="C")
    if not np.isfinite(array).all():
        raise ObservationError(f"{what} holds NaN or infinity; {hint}")
    return array
