"""The noise of one generation: how much there is, in which order it is drawn, and how a seed decides it. Knows nothing of
models.

Drawn in the order of the `diffusers` schedulers: the start of the chunk first, then one tensor for each step that draws
(the last DDPM step draws none), always at full shape (B, T, D).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockcache.errors import ObservationError
from blockcache.observations.tensors import as_tensor, check_finite
from blockcache.samplers import SamplerTable


def noise_shape(sampler: SamplerTable, chunk: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """All the noise of a generation of a chunk (B, T, D): the start, then one for each step that draws."""
    return (1 + sampler.draw_count, *chunk)


def draw(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """One tensor, with the dtype and device of `like`; a generator on another device draws there."""
    check_generator(generator)
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


def draw_all(
    sampler: SamplerTable,
    chunk: tuple[int, int, int],
    like: Tensor,
    generator: torch.Generator | None,
    start: Tensor | None = None,
) -> Tensor:
    """(1 + draws, B, T, D), tensor by tensor as a scheduler would draw them; `start` is the first where that was drawn."""
    count, *shape = noise_shape(sampler, chunk)
    drawn = [] if start is None else [start.to(like)]
    return torch.stack([*drawn, *(draw(tuple(shape), like, generator) for _ in range(count - len(drawn)))])


def check_generator(generator: Any) -> None:
    """Refuse what torch cannot draw from."""
    if not isinstance(generator, torch.Generator | None):
        raise ObservationError(
            f"noise is drawn from a torch.Generator, got {type(generator).__name__}; torch.Generator().manual_seed(0) makes "
            "a generator that always draws the same"
        )


def check_noise(noise: Any, sampler: SamplerTable, chunk: tuple[int, int, int], like: Tensor) -> Tensor:
    """Noise that a caller hands over, as (1 + draws, B, T, D)."""
    given, expected = as_tensor(noise, "noise"), noise_shape(sampler, chunk)
    if tuple(given.shape) != expected:
        raise ObservationError(
            f"noise has shape {tuple(given.shape)}, expected {expected}: the start and one tensor for each step that "
            "draws; policy.draw_noise makes it"
        )
    given = given.to(like)
    check_finite(given, "noise")
    return given


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
