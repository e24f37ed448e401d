"""The denoising loop on `diffusers` schedulers. Knows nothing of models or caching.

A caller may hand over all the noise as one tensor (1 + draws, B, T, D); the result is then bit-identical to that of the
generator which would have drawn it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from blockcache.models.noise import check_noise, draw
from blockcache.samplers import SamplerConfig, table


def make_scheduler(config: SamplerConfig) -> Any:
    """A fresh `diffusers` scheduler. Schedulers hold state while they run, so each generation needs its own."""
    from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler

    shared = {
        "num_train_timesteps": config.num_train_timesteps,
        "beta_schedule": config.beta_schedule,
        "beta_start": config.beta_start,
        "beta_end": config.beta_end,
        "prediction_type": config.prediction_type,
        "timestep_spacing": config.timestep_spacing,
        "steps_offset": config.steps_offset,
    }
    clipping = {"clip_sample": config.clip_sample, "clip_sample_range": config.clip_sample_range}
    if config.type == "ddpm":
        return DDPMScheduler(**shared, **clipping, variance_type=config.variance_type)
    if config.type == "ddim":
        return DDIMScheduler(**shared, **clipping, set_alpha_to_one=config.set_alpha_to_one)
    return DPMSolverMultistepScheduler(
        **shared,
        algorithm_type="dpmsolver++",
        solver_order=config.solver_order,
        lower_order_final=config.lower_order_final,
        final_sigmas_type=config.final_sigmas_type,
    )


def denoise(
    config: SamplerConfig,
    denoiser: Callable[[Tensor, Tensor], Tensor],
    chunk: tuple[int, int, int],
    like: Tensor,
    *,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    constrain: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Run all steps and return the clean chunk (B, T, D).

    `like` gives dtype and device; `constrain` is applied to the sample before every step and at the end (in-painting).
    """
    if noise is not None:
        noise = check_noise(noise, table(config), chunk, like)
    scheduler = make_scheduler(config)
    scheduler.set_timesteps(config.num_inference_steps)
    extra = {"eta": config.eta} if config.type == "ddim" else {}
    x = draw(chunk, like, generator) if noise is None else noise[0]
    feed = contextlib.nullcontext() if noise is None else _Feed(iter(noise[1:]))
    for t in scheduler.timesteps:
        x = constrain(x)
        output = denoiser(x, t)
        with feed:  # around the sampler only: inside it torch's modules would leave their fast paths
            x = scheduler.step(output, t, x, generator=generator, **extra).prev_sample
    return constrain(x)


class _Feed(TorchFunctionMode):
    """While active, `torch.randn` hands out prepared noise: diffusers' DDPM takes no noise argument."""

    def __init__(self, noise: Iterator[Tensor]) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            return next(self._noise)
        return func(*args, **(kwargs or {}))
