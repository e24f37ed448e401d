"""A guard, fitted to observations: what they looked like, and how far held-out ones lay from the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import ObservationError
from blockcache.observations import RECORDING
from blockcache_runtime.checks import read_array, read_frames
from blockcache_runtime.guard import ACTIONS, Cloud, Guard, look

LEAST = 32
"""Observations that a guard needs."""
ALARMS = 0.01
"""The share of observations like those it was fitted to that it is to find outside; half of it for each distance."""
FOLDS, DIRECTIONS, FLOOR = 5, 32, 0.01  # a hundredth of a number's spread counts as noise where it never varied


def fit(
    observed: Mapping[str, NDArray[Any]],
    inputs: Mapping[str, tuple[int, ...]],
    cameras: Sequence[str],
    action: str = "count",
) -> Guard:
    """A guard that knows these observations.

    Args:
        observed: (N, ...) by name.
        inputs: The policy's: shapes by name, without the batch. Those with the moments of the first are looked at.
        cameras: Which of them are frames.
        action: What is to be done about an observation that is outside, see `ACTIONS`.
    """
    if action not in ACTIONS:
        raise ObservationError(f"a guard is one of {', '.join(ACTIONS)}, got {action!r}")
    if not inputs:
        raise ObservationError("this policy does not tell what it observes, so no guard can look at it")
    moments = next(iter(inputs.values()))[0]
    shapes = {name: tuple(shape) for name, shape in inputs.items() if len(shape) > 1 and shape[0] == moments}
    arrays = {name: _checked(observed, name, shape, name in cameras) for name, shape in shapes.items()}
    frames = tuple(name for name in shapes if name in cameras)
    count = min(map(len, arrays.values()), default=0)
    if count < LEAST or count != max(map(len, arrays.values())):
        raise ObservationError(
            f"a guard needs {LEAST} observations or more, as many of each input, got {count}; {RECORDING}"
        )
    seen = look(arrays, shapes, frames)
    motion = cloud_of(seen.change) if moments > 1 else None
    return Guard(action, shapes, frames, count, cloud_of(seen.newest), motion)


def _checked(observed: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...], camera: bool) -> NDArray[Any]:
    what = f"the guard's observations {name!r}"
    if name not in observed:
        raise ObservationError(f"{what} are missing, got {', '.join(map(str, observed)) or 'nothing'}")
    if camera:
        return read_frames(observed[name], what, shape)
    array = read_array(observed[name], what)
    if array.shape[1:] != shape:
        raise ObservationError(f"{what} have shape {array.shape}, expected (N, {', '.join(map(str, shape))})")
    return array


def cloud_of(values: NDArray[np.float64]) -> Cloud:
    """The cloud of all values; its limit is what those of each fold reach in the cloud of the others.

    Args:
        values: (N, numbers), a row for each observation.
    """
    fold = np.arange(len(values)) % FOLDS
    held = np.sort(
        np.concatenate([_fitted(values[fold != one], 1.0).distances(values[fold == one]) for one in range(FOLDS)])
    )
    place = min(math.ceil((len(held) + 1) * (1 - ALARMS / 2)), len(held)) - 1
    return _fitted(values, float(max(held[place], FLOOR)))


def _fitted(values: NDArray[np.float64], limit: float) -> Cloud:
    mean, spread = values.mean(axis=0), values.std(axis=0)
    largest = float(spread.max())
    scale = np.maximum(spread, max(FLOOR * largest, 1e-6))  # what never varied is measured by what did
    apart = (values - mean) / scale
    _, sizes, directions = np.linalg.svd(apart, full_matrices=False)
    sizes = sizes[:DIRECTIONS] / math.sqrt(len(values))
    kept = sizes > FLOOR
    power = np.square(apart).sum() / len(values) - np.square(sizes[kept]).sum()
    rest = math.sqrt(max(power, 0.0) / max(apart.shape[1] - int(kept.sum()), 1))
    return Cloud(
        mean=_plain(mean),
        scale=_plain(scale),
        directions=tuple(map(_plain, directions[:DIRECTIONS][kept])),
        spread=_plain(sizes[kept]),
        rest=max(rest, FLOOR),
        limit=limit,
    )


def _plain(row: NDArray[np.float64]) -> tuple[float, ...]:
    """Seven digits, as float32 has them."""
    return tuple(float(f"{value:.7g}") for value in row)
