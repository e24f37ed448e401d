"""Samplers to and from the schedulers of diffusers, which is imported only when a scheduler is made."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from blockcache.errors import SamplerError, shortened
from blockcache.samplers.base import SAMPLERS, SamplerConfig

_OFF: tuple[Any, ...] = (None, False, "midpoint", -math.inf)  # what settings that no sampler here has must be
_UNKNOWN = (
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


def to_diffusers(config: SamplerConfig) -> Any:
    """A fresh scheduler whose `set_timesteps(config.num_inference_steps)` makes it do the same, or None if none does.

    Schedulers hold state while they run, so each generation needs its own.

    Args:
        config: The sampler.
    """
    form = config.in_diffusers
    clips = form is not None and "clip_sample" in form.lacks and getattr(config, "clip_sample", False)
    if form is None or clips or config.timesteps is not None:
        return None
    import diffusers

    settings = {name: getattr(config, name) for name in _shared(type(config))}
    return getattr(diffusers, form.scheduler)(**settings, **form.fixed)


def from_diffusers(
    scheduler: Any, num_inference_steps: int, step_arguments: Mapping[str, Any]
) -> tuple[SamplerConfig | None, str]:
    """The sampler of a scheduler and "", or None and what about the scheduler cannot be tabulated.

    Args:
        scheduler: Of diffusers.
        num_inference_steps: What its `set_timesteps` is given.
        step_arguments: What its `step` is given besides the sample, DDIM's eta for one.
    """
    return _from_settings(type(scheduler).__name__, _config(scheduler), num_inference_steps, step_arguments)


def from_config(
    name: str, settings: Mapping[str, Any], num_inference_steps: int | None, step_arguments: Mapping[str, Any]
) -> tuple[SamplerConfig | None, str]:
    """The same for a scheduler that is only described; none is made.

    Args:
        name: Its class in diffusers.
        settings: What it would be made with; for the others it has the defaults of diffusers.
        num_inference_steps: What its `set_timesteps` is given; None for as many as it was trained with.
        step_arguments: What its `step` is given besides the sample.
    """
    if name not in scheduler_names():
        return None, f"the sampler {shortened(name, 80)}"
    import diffusers

    known = inspect.signature(getattr(diffusers, name).__init__).parameters
    odd = [str(setting) for setting in settings if setting not in known or setting == "self"]
    if odd:
        return None, f"the sampler {name} with {shortened(odd[0], 80)}, which diffusers does not know"
    defaults = {setting: found.default for setting, found in known.items() if found.default is not found.empty}
    config = {**defaults, **settings}
    steps = config["num_train_timesteps"] if num_inference_steps is None else num_inference_steps
    return _from_settings(name, config, steps, step_arguments)


def scheduler_names() -> tuple[str, ...]:
    """The schedulers of diffusers that some sampler does the same as."""
    return tuple(sorted({kind.in_diffusers.scheduler for kind in SAMPLERS.values() if kind.in_diffusers is not None}))


def _from_settings(
    name: str, config: Mapping[str, Any], num_inference_steps: int, step_arguments: Mapping[str, Any]
) -> tuple[SamplerConfig | None, str]:
    forms = {kind: kind.in_diffusers for kind in SAMPLERS.values() if kind.in_diffusers is not None}
    named = {kind: form for kind, form in forms.items() if form.scheduler == name}
    if not named:
        return None, f"the sampler {name}"
    fits = [kind for kind, form in named.items() if form.fixed.items() <= config.items()]
    unknown = [setting for setting in _UNKNOWN if not _is_off(config.get(setting))]
    if not fits:
        unknown += [setting for form in named.values() for setting in form.fixed]
    if unknown:
        return None, f"the sampler {name} with {unknown[0]} = {str(config.get(unknown[0]))[:40]}"
    # only what the scheduler takes: made from another one's config, it still lists settings that it does not follow
    settings = {setting: config[setting] for setting in _shared(fits[0]) if config.get(setting) is not None}
    try:
        return fits[0](**{**settings, **step_arguments, "num_inference_steps": num_inference_steps}), ""
    except (SamplerError, TypeError) as error:
        return None, f"the sampler {name} with these settings ({error})"


def describe_scheduler(scheduler: Any, num_inference_steps: int, step_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Any other scheduler: its class and its plain settings, enough to tell two of them apart.

    Args:
        scheduler: Of diffusers, or of that shape.
        num_inference_steps: What its `set_timesteps` is given.
        step_arguments: What its `step` is given besides the sample.
    """
    plain = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity
        for key, value in sorted((_config(scheduler) | dict(step_arguments)).items())
        if isinstance(value, bool | int | float | str) and not key.startswith("_")
    }
    return {"type": type(scheduler).__name__, "num_inference_steps": int(num_inference_steps), **plain}


def _shared(kind: type[SamplerConfig]) -> list[str]:
    """The settings that a sampler and its scheduler have in common."""
    form = kind.in_diffusers
    apart = ("num_inference_steps", "timesteps", *(form.lacks if form is not None else ()))
    return [item.name for item in fields(kind) if item.name not in apart]


def _config(scheduler: Any) -> dict[str, Any]:
    return dict(getattr(scheduler, "config", {}))


def _is_off(value: Any) -> bool:
    return any(value is off or (isinstance(value, str | float) and value == off) for off in _OFF)
