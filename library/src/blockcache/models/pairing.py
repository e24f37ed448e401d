"""One generation with a given seed, for any policy: the same seed gives the same noise to every method and engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def generate(predict_action: Callable[..., Any], obs: Any, seed: int) -> Any:
    """Call a policy's `predict_action` with noise that depends on `seed` alone.

    A policy that takes no `generator` draws from torch's global one, which is seeded and put back afterwards.
    """
    if takes_generator(predict_action):
        return predict_action(obs, generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return predict_action(obs)


def takes_generator(predict_action: Callable[..., Any]) -> bool:
    return "generator" in inspect.signature(predict_action).parameters
