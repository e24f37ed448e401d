"""Observations: an array, or a mapping of arrays by name, one value for each sample of a batch in front. Checked once at
the door, cut into parts, dealt out, hashed. Knows nothing of policies."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.errors import ObservationError
from blockcache.finite import check_input

Observation: TypeAlias = Tensor | np.ndarray[Any, Any] | Mapping[str, Any]
"""(B, n_obs_steps, obs_dim), bare or under the key "obs"; for cameras a mapping of such."""


def as_tensor(value: Any) -> Tensor:
    """An array of numbers, or a sentence saying that it is none."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObservationError(f"the observation is not an array of numbers: {error}") from error


def check_observation(obs: Observation, n_obs_steps: int, obs_dim: int, like: Tensor) -> Tensor:
    """The observation as a tensor with the dtype and device of `like`, or a sentence saying what is wrong with it."""
    if isinstance(obs, Mapping):
        if "obs" not in obs:
            raise ObservationError(f"the observation has no key 'obs', got {sorted(map(str, obs))}")
        obs = obs["obs"]
    tensor = as_tensor(obs)
    if tensor.ndim != 3 or tuple(tensor.shape[1:]) != (n_obs_steps, obs_dim) or tensor.shape[0] < 1:
        raise ObservationError(
            f"the observation has shape {tuple(tensor.shape)}, expected (batch, {n_obs_steps}, {obs_dim})"
        )
    tensor = tensor.to(device=like.device, dtype=like.dtype)
    check_finite(tensor)
    return tensor


def check_finite(value: Any, what: str = "the observation") -> None:
    """Refuse NaN, infinity and absurdly large values anywhere in an observation, however nested, or in "noise"."""
    for tensor in _floating(value):
        check_input(largest(tensor), what)


def largest(value: Any) -> float:
    """The largest magnitude anywhere in an observation or tensor; NaN if one of the values is."""
    found = [
        abs(float(torch.maximum(-low, high))) for low, high in (item.detach().aminmax() for item in _floating(value))
    ]
    return max(found, key=lambda item: (math.isnan(item), item), default=0.0)


def _floating(value: Any) -> Iterator[Tensor]:
    """All tensors with fractions in something nested."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _floating(item)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
        yield from _floating(torch.as_tensor(value))
    elif isinstance(value, Tensor) and value.is_floating_point() and value.numel():
        yield value


def batch_size(batch: Any) -> int:
    """How many samples a batch holds."""
    shape = next((tuple(int(size) for size in getattr(leaf, "shape", ())) for leaf in _leaves(batch)), ())
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


def as_one_batch(observations: Any) -> Any:
    """A batch as it is, or many batches, such as `calibrate` takes them, put together."""
    if isinstance(observations, Mapping) or hasattr(observations, "shape"):
        return observations
    batches = list(observations) if isinstance(observations, Iterable) else []
    if not batches:
        raise ObservationError(f"expected a batch of observations or a list of batches, got {observations!r}"[:200])
    if isinstance(batches[0], Mapping):
        return {name: as_one_batch([batch[name] for batch in batches]) for name in batches[0]}
    return torch.cat([as_tensor(batch) for batch in batches])


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


def _leaves(batch: Any) -> Iterator[Any]:
    return (leaf for _, leaf in _named(batch))


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

    batch  the observations
    sizes  how many samples each part needs
    seed   another one deals anew
    taken  a batch whose samples go to no part, such as what a schedule was calibrated on
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
