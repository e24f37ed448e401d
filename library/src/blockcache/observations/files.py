"""Observations in .npz files: an array 'obs', or several by the policy's names; frames keep the bytes of their camera.

Knows nothing of policies and of torch.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import FileError, ObservationError, shortened
from blockcache.files import PathLike, parse_arrays, read_bytes, write_arrays
from blockcache.observations.trees import one_moment
from blockcache_runtime.checks import check_frames

ALONE = "obs"
"""The name of an observation that is one array."""
MOMENTS = "moments"
"""Beside the observations: (N, 2) the episode of each and the place in it."""


def save_observations(path: PathLike, batch: Any, moments: NDArray[np.int64] | None = None) -> None:
    """Write a batch, and when each of its samples was made, if that is known."""
    arrays = dict(batch) if isinstance(batch, Mapping) else {ALONE: batch}
    if MOMENTS in arrays:
        raise ObservationError(
            f"an observation called {MOMENTS!r} cannot be saved: that name is taken; call it otherwise"
        )
    known = {} if moments is None else {MOMENTS: moments}
    write_arrays(path, **{name: np.asarray(array) for name, array in arrays.items()}, **known)


def load_observations(path: PathLike) -> dict[str, NDArray[Any]]:
    """All arrays of a file by name, as they are; `fit_observations` makes a batch of them."""
    return parse_arrays(read_bytes(path, "observations"), "observations", path)


def fit_observations(
    arrays: Mapping[str, NDArray[Any]], inputs: Mapping[str, tuple[int, ...]], cameras: Container[str], path: PathLike
) -> Any:
    """A batch as a policy takes it: an array, or several by name.

    A task that shows one array has no name for it: it is the only input of a policy that has one.

    Args:
        arrays: Of a file.
        inputs: The policy's: shapes by name, without the batch.
        cameras: Which of them are frames.
        path: Of that file, for errors.
    """
    if len(inputs) == 1 and ALONE in arrays:
        arrays = {**dict.fromkeys(inputs, arrays[ALONE]), **arrays}
    found = {name: _fitting(arrays, name, shape, name in cameras, path) for name, shape in inputs.items()}
    return found[ALONE] if set(found) == {ALONE} else found


def _fitting(
    arrays: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...], camera: bool, path: PathLike
) -> NDArray[Any]:
    """(N, *shape) float32, or the bytes of a camera."""
    expected = f"(N, {', '.join(map(str, shape))})"
    if name not in arrays:
        raise FileError(
            f"cannot read observations from {path}: expected an array {name!r} of shape {expected}, got "
            f"{shortened(', '.join(arrays), 200) or 'no array'}"
        )
    array: NDArray[Any] = one_moment(arrays[name], shape)
    what = f"the observations {name!r} in {path}"
    if array.dtype.kind not in "fiu":
        raise ObservationError(f"{what} are no numbers but {array.dtype}")
    if camera:
        check_frames(what, array.shape, str(array.dtype), shape, lambda: (float(array.min()), float(array.max())))
        return array if array.dtype == np.uint8 else array.astype(np.float32)
    if array.ndim == 0 or array.shape[1:] != tuple(shape) or not len(array):
        raise ObservationError(f"{what} have shape {array.shape}, expected {expected}")
    with np.errstate(over="ignore"):
        rows = np.asarray(array, dtype=np.float32)
    if not np.isfinite(rows).all():
        raise ObservationError(f"{what} hold NaN or infinity; leave those out")
    return rows
