"""Observations: an array, or a mapping of arrays by name, one value for each sample of a batch in front. Checked once at
the door, cut into parts, hashed. Knows nothing of policies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from blockcache.errors import ObservationError

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


def check_finite(value: Any) -> None:
    """Refuse NaN and infinity anywhere in an observation, however nested."""
    if isinstance(value, Mapping):
        for item in value.values():
            check_finite(item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_finite(item)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
        check_finite(torch.as_tensor(value))
    elif isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise ObservationError("the observation holds NaN or infinity; check the sensor before asking for an action")


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


def pick(batch: Any, places: Sequence[int]) -> Any:
    """The samples at those places, in that order; a place may be named often."""
    if isinstance(batch, Mapping):
        return {key: pick(value, places) for key, value in batch.items()}
    return batch[list(places)] if getattr(batch, "shape", ()) else batch
