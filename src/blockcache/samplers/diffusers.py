"""Samplers of diffusers in our words. Knows nothing of policies; diffusers itself is not imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from blockcache.errors import SamplerError
from blockcache.samplers.core import SamplerConfig

_TYPES = {"DDPMScheduler": "ddpm", "DDIMScheduler": "ddim", "DPMSolverMultistepScheduler": "dpmsolver++"}
_OFF: tuple[Any, ...] = (None, False, "midpoint", -math.inf)  # what settings that are not in our words must be
_UNKNOWN_TO_US = (
    "thresholding",
    "trained_betas",
    "rescale_betas_zero_snr",
    "solver_type",
    "euler_at_final",
    "lambda_min_clipped",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_lu_lambdas",
    "use_flow_sigmas",
)



def from_diffusers(
    scheduler: Any, num_inference_steps: int, step_arguments: Mapping[str, Any]
) -> tuple[SamplerConfig | None, str]:
    """The sampler in our words if it is one that we can tabulate, else what about it we cannot."""
    config = dict(getattr(scheduler, "config", {}))
    name = type(scheduler).__name__
    kind = _TYPES.get(name)
    if kind is None:
        return None, f"the sampler {name}"
    unknown = [setting for setting in _UNKNOWN_TO_US if not _is_off(config.get(setting))]
    if kind == "dpmsolver++" and config.get("algorithm_type") != kind:
        unknown.append("algorithm_type")
    if unknown:
        return None, f"the sampler {name} with {unknown[0]} = {str(config.get(unknown[0]))[:40]}"
    settings = {item.name: config[item.name] for item in fields(SamplerConfig) if config.get(item.name) is not None}
    settings |= step_arguments
    try:
        return SamplerConfig(**{**settings, "type": kind, "num_inference_steps": num_inference_steps}), ""
    except (SamplerError, TypeError) as error:
        return None, f"the sampler {name} with these settings ({error})"


def _is_off(value: Any) -> bool:
    return any(value is off or (isinstance(value, str | float) and value == off) for off in _OFF)


def plain_settings(scheduler: Any, num_inference_steps: int, step_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Any other sampler: its class and its plain settings, enough to tell two of them apart."""
    config = dict(getattr(scheduler, "config", {})) | dict(step_arguments)
    plain = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity
        for key, value in sorted(config.items())
        if isinstance(value, bool | int | float | str) and not key.startswith("_")
    }
    return {"type": type(scheduler).__name__, "num_inference_steps": int(num_inference_steps), **plain}
