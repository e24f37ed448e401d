"""Another sampler for the same training, with another number of steps. Settings only; knows nothing of policies."""

from __future__ import annotations

from typing import Any

from blockcache.errors import SamplerError
from blockcache.samplers.base import SAMPLERS, SamplerConfig, sampler_class
from blockcache.samplers.diffusion import DDPM, Diffusion
from blockcache.samplers.fitted import Fitted

_TRAINING = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "prediction_type")
_KEPT = (*_TRAINING, "clip_sample", "clip_sample_range")


def sampler_names() -> list[str]:
    """Of the samplers that a number of steps is enough for; a fitted one has constants that nobody can guess."""
    return [name for name, kind in SAMPLERS.items() if not issubclass(kind, Fitted)]


def fewer_steps(own: SamplerConfig, kind: str, steps: int) -> SamplerConfig:
    """The same diffusion (or flow), drawn by another sampler in fewer steps: what a user would try first.

    Args:
        own: The policy's sampler, whose noise levels, prediction and clipping are kept.
        kind: The name of the sampler to use; its own settings take their defaults.
        steps: How many; spaced as that sampler does by default, whatever the policy's own spacing, since not every
            spacing can have every number of steps.
    """
    chosen = sampler_class(kind)
    if issubclass(chosen, Fitted):
        raise SamplerError(
            f"the constants of a {kind} sampler follow from no number of steps; fit one with fit_sampler"
        )
    if issubclass(chosen, Diffusion) is not isinstance(own, Diffusion):
        raise SamplerError(
            f"a policy trained for {own.type} cannot be run by {kind}: one denoises, the other follows a flow; "
            f"use {own.type}-{steps}, or train it anew"
        )
    settings: dict[str, Any] = {}
    if isinstance(own, Diffusion):
        settings = {name: getattr(own, name) for name in _KEPT}
    if isinstance(own, DDPM) and chosen is DDPM:
        settings["variance_type"] = own.variance_type
    return chosen(**settings, num_inference_steps=steps)
