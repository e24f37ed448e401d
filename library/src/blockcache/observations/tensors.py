"""Observations as torch takes them, checked before a policy sees them; an error says what was expected. Knows nothing of
policies."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from blockcache.errors import ObservationError
from blockcache_runtime.checks import BYTE, check_frames, check_input, shape_text

Observation: TypeAlias = Tensor | np.ndarray[Any, Any] | Mapping[str, Any]
"""(B, n_obs_steps, obs_dim), bare or under the key "obs"; for cameras a mapping of such."""


def as_tensor(value: Any, what: str = "the observation") -> Tensor:
    """An array of numbers however it lies in memory, or a sentence saying that it is none; `what` names it there.

    Args:
        value: A tensor, a numpy array, or nested lists of numbers.
        what: What the sentence calls it.
    """
    if isinstance(value, np.ndarray):
        # torch knows no other byte order and no steps backwards, and warns of memory that cannot be written
        lies_well = value.dtype.isnative and value.flags.writeable and all(stride >= 0 for stride in value.strides)
        value = value if lies_well else value.astype(value.dtype.newbyteorder("="), order="C")
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:150]
        raise ObservationError(f"{what} is not an array of numbers: {reason}") from error
    oddities = {
        "is a nested tensor; give one tensor in which all samples have the same shape": tensor.is_nested,
        "is a sparse tensor; call to_dense() first": tensor.layout != torch.strided,
        "is on the meta device, where tensors hold no numbers": tensor.is_meta,
        "is a quantized tensor; call dequantize() first": tensor.is_quantized,
        f"is not an array of numbers: its type is {tensor.dtype}": tensor.is_complex(),
    }
    for words, holds in oddities.items():
        if holds:
            raise ObservationError(f"{what} {words}")
    return tensor


def check_observation(obs: Observation, n_obs_steps: int, obs_dim: int, like: Tensor) -> Tensor:
    """The observation as a tensor with the dtype and device of `like`, or a sentence saying what is wrong with it.

    Args:
        obs: As somebody handed it over, bare or under the key "obs".
        n_obs_steps: Moments that the policy sees.
        obs_dim: Numbers of a moment.
        like: Gives dtype and device.
    """
    if isinstance(obs, Mapping):
        if "obs" not in obs:
            raise ObservationError(f"the observation has no key 'obs', got {sorted(map(str, obs))}")
        obs = obs["obs"]
    return _checked(obs, "the observation", (n_obs_steps, obs_dim), False, like)


def check_tree(
    obs: Any, inputs: Mapping[str, tuple[int, ...]], cameras: Container[str], like: Tensor
) -> dict[str, Tensor]:
    """An observation of several inputs, as tensors with the dtype and device of `like`, or a sentence saying what is wrong.

    Args:
        obs: As somebody handed it over.
        inputs: Shapes by name, without the batch.
        cameras: Which of them are frames: uint8, or floats from 0 to 1, which is what they become.
        like: Gives dtype and device.
    """
    if not isinstance(obs, Mapping):
        raise ObservationError(
            f"an observation of this policy is a mapping of arrays, expected {listed(inputs)}, got {type(obs).__name__}"
        )
    if missing := [name for name in inputs if name not in obs]:
        raise ObservationError(
            f"the observation has no {missing[0]!r}, expected {listed(inputs)}, got {', '.join(map(str, obs)) or 'nothing'}"
        )
    found = {
        name: _checked(obs[name], f"the observation {name!r}", shape, name in cameras, like)
        for name, shape in inputs.items()
    }
    if len(sizes := {name: len(tensor) for name, tensor in found.items()}) and len(set(sizes.values())) > 1:
        raise ObservationError(f"the observation needs one batch size for all its inputs, got {sizes}")
    return found


def _checked(value: Any, what: str, shape: tuple[int, ...], camera: bool, like: Tensor) -> Tensor:
    if isinstance(value, Mapping):
        raise ObservationError(f"{what} is a mapping, expected an array {shape_text(shape)}")
    tensor = as_tensor(value, what)
    if camera:
        check_camera(tensor, what, shape)
        frames = tensor.to(device=like.device, dtype=like.dtype)
        return frames / BYTE if tensor.dtype == torch.uint8 else frames
    if tensor.ndim != 1 + len(shape) or tensor.shape[0] < 1 or tuple(tensor.shape[1:]) != shape:
        raise ObservationError(f"{what} has shape {tuple(tensor.shape)}, expected {shape_text(shape)}")
    tensor = tensor.to(device=like.device, dtype=like.dtype)
    check_finite(tensor, what)
    return tensor


def check_camera(frames: Tensor, what: str, shape: tuple[int, ...]) -> None:
    """Refuse what are no frames of a camera: channels first, bytes, or fractions from 0 to 1.

    Args:
        frames: With the batch in front.
        what: The camera in a sentence.
        shape: Moments, channels, height and width.
    """

    def reach() -> tuple[float, float]:
        low, high = frames.detach().aminmax()
        return float(low), float(high)  # NaN if one of the values is

    check_frames(what, tuple(frames.shape), str(frames.dtype).removeprefix("torch."), shape, reach)


def listed(inputs: Mapping[str, tuple[int, ...]]) -> str:
    """The inputs of a policy, for a sentence.

    Args:
        inputs: Shapes by name, without the batch.
    """
    return " and ".join(f"{name!r} {shape_text(shape)}" for name, shape in inputs.items())


def check_finite(value: Any, what: str = "the observation") -> None:
    """Refuse NaN, infinity and absurdly large values anywhere in an observation, however nested, or in "noise".

    Args:
        value: A tensor, an array, or a mapping or list of such; whatever else there is counts as sound.
        what: What the sentence calls it.
    """
    for tensor in _floating(value, what):
        check_input(largest(tensor), what)


def largest(value: Any) -> float:
    """The largest magnitude anywhere in an observation or tensor; NaN if one of the values is.

    Args:
        value: A tensor, an array, or a mapping or list of such; 0 if it holds no fractions.
    """
    found = [
        abs(float(torch.maximum(-low, high))) for low, high in (item.detach().aminmax() for item in _floating(value))
    ]
    return max(found, key=lambda item: (math.isnan(item), item), default=0.0)


def _floating(value: Any, what: str = "the observation") -> Iterator[Tensor]:
    """All tensors with fractions in something nested."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _floating(item, what)
    elif isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
        tensor = as_tensor(value, what)
        if tensor.is_floating_point() and tensor.numel():
            yield tensor


def as_one_batch(observations: Any) -> Any:
    """A batch as it is, or many batches, such as `calibrate` takes them, put together.

    Args:
        observations: An array (N, ...) or a mapping of such; or an iterable of these.
    """
    if isinstance(observations, Mapping) or hasattr(observations, "shape"):
        return observations
    batches = list(observations) if isinstance(observations, Iterable) else []
    if not batches:
        raise ObservationError(f"expected a batch of observations or a list of batches, got {observations!r}"[:200])
    if isinstance(batches[0], Mapping):
        return {name: as_one_batch([batch[name] for batch in batches]) for name in batches[0]}
    return torch.cat([as_tensor(batch) for batch in batches])
