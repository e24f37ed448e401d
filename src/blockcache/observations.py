"""Observations: what a low-dimensional policy takes, checked once at the door. Knows nothing of policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from blockcache.errors import ObservationError

Observation: TypeAlias = Tensor | np.ndarray[Any, Any] | Mapping[str, Any]
"""(B, n_obs_steps, obs_dim), bare or under the key "obs"."""


def check_observation(obs: Observation, n_obs_steps: int, obs_dim: int, like: Tensor) -> Tensor:
    """The observation as a tensor with the dtype and device of `like`, or a sentence saying what is wrong with it."""
    if isinstance(obs, Mapping):
        if "obs" not in obs:
            raise ObservationError(f"the observation has no key 'obs', got {sorted(map(str, obs))}")
        obs = obs["obs"]
    try:
        tensor = torch.as_tensor(obs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObservationError(f"the observation is not an array of numbers: {error}") from error
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
