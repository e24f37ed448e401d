"""A policy as the recorder and the engines see it: its denoiser, sampler, timesteps and fingerprint.

Any object with `model`, `noise_scheduler`, `num_inference_steps` and `predict_action` will do, ours or foreign. Knows
nothing of schedules.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError
from blockcache.fingerprint import Fingerprint
from blockcache.models.adapter import Adapter
from blockcache.models.registry import adapter_for
from blockcache.samplers import SamplerConfig, from_diffusers
from blockcache.samplers.diffusers import describe_scheduler


@dataclass(frozen=True, eq=False)
class Target:
    """`timesteps` in execution order, as the denoiser is given them.

    `sampler` is None if we cannot tabulate it, and `untabulated` then names what we do not know.
    """

    policy: Any
    adapter: Adapter
    timesteps: tuple[float, ...]
    sampler: SamplerConfig | None
    untabulated: str
    fingerprint: Fingerprint

    @property
    def ours(self) -> bool:
        """Whether a generation runs nothing but code of this package and torch, so that what it does is known."""
        policy, denoiser = type(self.policy), self.adapter.denoiser
        methods = [getattr(policy, name, None) for name in ("predict_action", "_sample")] + [type(denoiser).forward]
        if not all(str(getattr(method, "__module__", "")).startswith("blockcache.") for method in methods):
            return False
        return not any(
            "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
            for module in denoiser.modules()
        )

    @property
    def reentrant(self) -> bool:
        """Whether several threads may generate at once; foreign policies hold one scheduler, so theirs may not."""
        return bool(getattr(self.policy, "reentrant", False))


def examine(policy: Any) -> Target:
    """Look at a policy, or say in one sentence why it cannot be used."""
    missing = [
        name
        for name in ("model", "noise_scheduler", "num_inference_steps", "predict_action")
        if getattr(policy, name, None) is None
    ]
    if missing:
        raise PolicyError(
            f"{type(policy).__name__} is no diffusion policy that we know: it lacks {', '.join(missing)}; "
            "expected model, noise_scheduler, num_inference_steps and predict_action"
        )
    denoiser = policy.model
    if not isinstance(denoiser, nn.Module):
        raise PolicyError(f"the policy's model must be a torch module, got {type(denoiser).__name__}")
    check_eval_mode(policy, every_module=True)
    adapter = adapter_for(denoiser)
    timesteps = _timesteps(policy)
    sampler, untabulated = _sampler(policy)
    scheduler = policy.noise_scheduler, policy.num_inference_steps, _step_arguments(policy)
    settings = describe_scheduler(*scheduler) if sampler is None else sampler.to_dict()
    return Target(
        policy=policy,
        adapter=adapter,
        timesteps=timesteps,
        sampler=sampler,
        untabulated=untabulated,
        fingerprint=Fingerprint(
            family=adapter.family,
            blocks=tuple(block.name for block in adapter.blocks),
            widths=adapter.widths,
            steps=len(timesteps),
            sampler=settings,
            weights=weights_hash(policy if isinstance(policy, nn.Module) else denoiser),
        ),
    )


def check_eval_mode(policy: Any, every_module: bool = False) -> None:
    """Dropout would make every comparison between steps a lie. A look at every module is too slow for each call."""
    modules = (policy if isinstance(policy, nn.Module) else policy.model).modules() if every_module else (policy.model,)
    if any(module.training for module in modules):
        raise PolicyError("the policy is in train mode; call policy.eval() first")


def weights_hash(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all parameters and buffers.

    The public code's `_dummy_variable`s are left out: its policy and ours with the same weights have the same hash.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if name.endswith("_dummy_variable"):
            continue
        if not isinstance(tensor, Tensor):  # a module's extra state; of unknown type, so only its presence counts
            digest.update(f"{name} {type(tensor).__name__}\n".encode())
            continue
        array = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}\n".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().data if array.numel() else b"")
    return digest.hexdigest()


def _timesteps(policy: Any) -> tuple[float, ...]:
    scheduler = copy.deepcopy(policy.noise_scheduler)
    scheduler.set_timesteps(policy.num_inference_steps)
    return tuple(torch.as_tensor(scheduler.timesteps).tolist())


def _sampler(policy: Any) -> tuple[SamplerConfig | None, str]:
    """The sampler in our words if it is one that we can tabulate, else what about it we cannot."""
    own = getattr(policy, "sampler", None)
    if isinstance(own, SamplerConfig):
        return own, ""
    return from_diffusers(policy.noise_scheduler, policy.num_inference_steps, _step_arguments(policy))


def _step_arguments(policy: Any) -> dict[str, Any]:
    """What the public code hands to the scheduler's step, DDIM's eta for one."""
    given = getattr(policy, "kwargs", None)
    return dict(given) if isinstance(given, Mapping) else {}
