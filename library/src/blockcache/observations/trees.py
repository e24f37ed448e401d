"""Trees of arrays: cut into parts, dealt out, put together, hashed. Any arrays that numpy can read. Knows nothing of
policies and of torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import ObservationError


def batch_size(batch: Any) -> int:
    """How many samples a batch holds."""
    shape = next((tuple(int(size) for size in getattr(leaf, "shape", ())) for leaf in leaves(batch)), ())
    if len(shape) < 2 or shape[0] < 1:
        raise ObservationError(
            f"an observation must be a tensor (batch, ...) or a mapping of them, got {type(batch).__name__} {shape}"
        )
    return shape[0]


def rows(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a batch; what is not one value per sample stays."""
    return _rows(batch, start, stop, batch_size(batch))


def parts(batch: Any, size: int) -> list[Any]:
    """A batch cut into batches of at most `size` samples."""
    total = batch_size(batch)
    return [_rows(batch, start, min(start + size, total), total) for start in range(0, total, size)]


def one_moment(array: Any, shape: Sequence[int]) -> Any:
    """(N, 1, *shape) -> (N, *shape): rollouts show moments, and a policy that sees one may have no axis for it."""
    return array[:, 0] if array.ndim == len(shape) + 2 and array.shape[1] == 1 else array


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of one form behind a new axis in front: moments of a history, or samples of a batch."""
    if isinstance(trees[0], Mapping):
        return {key: stacked([tree[key] for tree in trees]) for key in trees[0]}
    return np.stack(trees)


def joined(batches: Sequence[Any]) -> Any:
    """Batches of one form, one behind the other."""
    if isinstance(batches[0], Mapping):
        return {key: joined([batch[key] for batch in batches]) for key in batches[0]}
    return np.concatenate([np.asarray(batch) for batch in batches])


def leaves(tree: Any) -> Iterator[Any]:
    """The arrays of a tree."""
    return (leaf for _, leaf in _named(tree))


def hash_observations(batch: Any) -> str:
    """One name for a batch's shapes and bytes, the same in every process."""
    digests = {}
    for name, leaf in _named(batch):
        array = np.ascontiguousarray(np.asarray(leaf))
        digests[name] = {"shape": list(array.shape), "bytes": hashlib.sha256(array.tobytes()).hexdigest()}
    value = digests[""] if set(digests) == {""} else digests
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _named(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _named(value, f"{name}/{key}")
    else:
        yield name, batch


def _rows(batch: Any, start: int, stop: int, size: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: _rows(value, start, stop, size) for key, value in batch.items()}
    if not getattr(batch, "shape", ()):
        return batch  # not one value per sample
    if len(batch) != size:
        raise ObservationError(f"an observation mixes batches of {size} and {len(batch)} samples")
    return batch[start:stop]


def pick(batch: Any, places: Sequence[int] | NDArray[np.intp]) -> Any:
    """The samples at those places, in that order; a place may be named often."""
    if isinstance(batch, Mapping):
        return {key: pick(value, places) for key, value in batch.items()}
    return batch[list(places)] if getattr(batch, "shape", ()) else batch


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
            "such as 'blockcache policy observe' records"
        )
    ends = np.cumsum(list(sizes.values()))
    dealt = np.array([first[name] for name in free], dtype=np.intp)
    return {name: dealt[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}
