"""A live object of the public code's runner as an `RDTPolicy`: same modules, same weights, found by their shape."""

from __future__ import annotations

from typing import Any

from blockcache.errors import PolicyError
from blockcache.models.rdt.adapter import norm_of, shaped
from blockcache.models.rdt.convert import sizes_of
from blockcache.models.rdt.denoiser import ADAPTORS, RDTDenoiser
from blockcache.models.rdt.policy import RDTConfig, RDTPolicy
from blockcache.samplers.diffusers import from_diffusers


def policy_of(runner: Any, n_action_steps: int | None = None) -> RDTPolicy:
    """A policy that takes one observation and shares the runner's modules; in eval mode if those are.

    runner          has `model`, three adaptors, `noise_scheduler_sample` and `num_inference_timesteps`
    n_action_steps  how many actions of a chunk are executed, all of them without it
    """
    needed = ("model", *ADAPTORS, "noise_scheduler_sample", "num_inference_timesteps")
    if missing := [name for name in needed if getattr(runner, name, None) is None]:
        raise PolicyError(f"{type(runner).__name__} is no RDT runner: it lacks {', '.join(missing)}")
    if (lack := shaped(runner.model)) is not None:
        raise PolicyError(f"{type(runner).__name__} is no RDT runner: its model {lack}")
    sampler, unknown = from_diffusers(runner.noise_scheduler_sample, runner.num_inference_timesteps, {})
    if sampler is None:
        raise PolicyError(f"the runner's sampler is not known here: {unknown}")
    denoiser = RDTDenoiser(runner.model, runner.lang_adaptor, runner.img_adaptor, runner.state_adaptor)
    shapes = {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}
    sizes = sizes_of(shapes)
    config = RDTConfig(
        **{**sizes, "n_action_steps": n_action_steps or sizes["horizon"]}, norm=norm_of(denoiser)[0], sampler=sampler
    )
    policy = RDTPolicy(config, denoiser)
    policy.training = denoiser.training = (
        runner.model.training
    )  # their own flags only: the runner's modules keep theirs
    return policy
