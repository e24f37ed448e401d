"""Observations are trees: an array, or a mapping of arrays by name, one value for each sample of a batch in front.

This room checks, cuts, deals out, hashes, stacks, saves and loads them, with any arrays that numpy can read. In an .npz file
they are an array 'obs', or several by the policy's names; frames keep the bytes of their camera. Knows nothing of policies.
What needs torch is in `observations.tensors`, so that simulators and verbs need not wait for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import FileError, ObservationError, shortened
from blockcache.files import PathLike, digest, parse_arrays, read_bytes, write_arrays
from blockcache_runtime.checks import check_frames
from blockcache_runtime.observation_log import ALONE, MOMENTS, log_files

RECORDING = (
    "such as 'blockcache policy observe' records in a simulator and blockcache_runtime.ObservationLog on a robot "
    "(docs/on-a-robot.md)"
)
"""Where observations come from, for errors."""


def batch_size(batch: Any) -> int:
    """How many samples a batch holds.

    Args:
        batch: An array (N, ...), or a mapping of such.
    """
    shape = next((tuple(int(size) for size in getattr(leaf, "shape", ())) for _, leaf in _named(batch)), ())
    if len(shape) < 2 or shape[0] < 1:
        raise ObservationError(
            f"an observation must be a tensor (batch, ...) or a mapping of them, got {type(batch).__name__} {shape}"
        )
    return shape[0]


def rows(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a batch; what is not one value per sample stays.

    Args:
        batch: An array (N, ...), or a mapping of such.
        start: Place of the first sample.
        stop: One behind the last.
    """
    size = batch_size(batch)

    def cut(leaf: Any) -> Any:
        if not getattr(leaf, "shape", ()):
            return leaf  # not one value per sample
        if len(leaf) != size:
            raise ObservationError(f"an observation mixes batches of {size} and {len(leaf)} samples")
        return leaf[start:stop]

    return _mapped(cut, batch)


def parts(batch: Any, size: int) -> list[Any]:
    """A batch cut into batches of at most `size` samples.

    Args:
        batch: An array (N, ...), or a mapping of such.
        size: Of all but the last, which may have fewer.
    """
    return [rows(batch, start, start + size) for start in range(0, batch_size(batch), size)]


def one_moment(array: Any, shape: Sequence[int]) -> Any:
    """(N, 1, *shape) -> (N, *shape): rollouts show moments, and a policy that sees one may have no axis for it.

    Args:
        array: Of one input, with the batch in front.
        shape: What the policy takes of that input, without the batch.
    """
    return array[:, 0] if array.ndim == len(shape) + 2 and array.shape[1] == 1 else array


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of one form behind a new axis in front: moments of a history, or samples of a batch.

    Args:
        trees: One or more; arrays at one place of all of them have one shape.
    """
    return _mapped(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees)


def joined(batches: Sequence[Any]) -> Any:
    """Batches of one form, one behind the other.

    Args:
        batches: One or more; arrays at one place may differ in their first axis only.
    """
    return _mapped(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *batches)


def _mapped(function: Callable[..., Any], *trees: Any) -> Any:
    """What a function makes of the arrays at each place of one tree, or of several of one form."""
    if isinstance(trees[0], Mapping):
        return {key: _mapped(function, *(tree[key] for tree in trees)) for key in trees[0]}
    return function(*trees)


def hash_observations(batch: Any) -> str:
    """One name for a batch's shapes and bytes, the same in every process.

    Args:
        batch: An array, or a mapping of such.
    """
    found = {}
    for name, leaf in _named(batch):
        array = np.ascontiguousarray(np.asarray(leaf))
        found[name] = {"shape": list(array.shape), "bytes": hashlib.sha256(array.tobytes()).hexdigest()}
    return digest(found[""] if set(found) == {""} else found)


def _named(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _named(value, f"{name}/{key}")
    else:
        yield name, batch


def pick(batch: Any, places: Sequence[int] | NDArray[np.intp]) -> Any:
    """The samples at those places, in that order; a place may be named often.

    Args:
        batch: An array (N, ...), or a mapping of such.
        places: From 0 to N - 1.
    """
    chosen = list(places)
    return _mapped(lambda leaf: leaf[chosen] if getattr(leaf, "shape", ()) else leaf, batch)


def split(batch: Any, sizes: Mapping[str, int], seed: int = 0, taken: Any = None) -> dict[str, NDArray[np.intp]]:
    """Disjoint parts of a batch by name: the places of each one's samples. What was tuned on one part is judged on another.

    Who goes where depends on the samples' values and the seed, not on their order. Equal samples count once, so that
    none can be in two parts.

    Args:
        batch: The observations.
        sizes: How many samples each part needs.
        seed: Another one deals anew.
        taken: A batch whose samples go to no part, such as what a schedule was calibrated on.
    """
    used = set() if taken is None else {hash_observations(one) for one in parts(taken, 1)}
    first = {hash_observations(one): place for place, one in reversed(list(enumerate(parts(batch, 1))))}
    free = sorted(first.keys() - used, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    if len(free) < sum(sizes.values()):
        wanted = " and ".join(f"{size} for {name}" for name, size in sizes.items())
        raise ObservationError(
            f"{wanted} need {sum(sizes.values())} different observations, got {len(free)}; give more observations, "
            f"{RECORDING}"
        )
    ends = np.cumsum(list(sizes.values()))
    dealt = np.array([first[name] for name in free], dtype=np.intp)
    return {name: dealt[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}


def save_observations(path: PathLike, batch: Any, moments: NDArray[np.int64] | None = None) -> None:
    """Write a batch, and when each of its samples was made, if that is known.

    Args:
        path: Of the .npz file.
        batch: An array (N, ...), or a mapping of such.
        moments: (N, 2) the episode of each sample, and its place in that.
    """
    arrays = dict(batch) if isinstance(batch, Mapping) else {ALONE: batch}
    if MOMENTS in arrays:
        raise ObservationError(
            f"an observation called {MOMENTS!r} cannot be saved: that name is taken; call it otherwise"
        )
    known = {} if moments is None else {MOMENTS: moments}
    write_arrays(path, **{name: np.asarray(array) for name, array in arrays.items()}, **known)


def load_observations(path: PathLike) -> dict[str, NDArray[Any]]:
    """All arrays of a file by name, as they are; `fit_observations` makes a batch of them.

    Args:
        path: A file, or the directory of an `ObservationLog`: its files together, in an order in which the first few stand
            for all of them.
    """
    if not Path(path).is_dir():
        return parse_arrays(read_bytes(path, "observations"), "observations", path)
    files = [parse_arrays(read_bytes(file, "observations"), "observations", file) for file in log_files(path)]
    if not files:
        raise FileError(f"no observations at {path}: expected files of an ObservationLog, or one .npz file")
    if any(_form(file) != _form(files[0]) for file in files):
        raise FileError(f"the files in {path} hold observations of different shapes; keep one policy's in a directory")
    found: dict[str, NDArray[Any]] = joined(files)
    order = np.random.default_rng(0).permutation(len(next(iter(found.values()))))
    return {name: array[order] for name, array in found.items()}


def _form(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: (array.shape[1:], array.dtype) for name, array in arrays.items()}


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
    if array.dtype.kind not in ("fiu" if camera else "fiub"):  # a mask of words is one of truths
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
