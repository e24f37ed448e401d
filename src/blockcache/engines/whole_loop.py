"""What the loop and onnx engines share: they replace `predict_action` as a whole and run a copy of the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from blockcache.attach.patching import Patches
from blockcache.engines.compiled import CompiledPolicy
from blockcache.engines.guard import WeightsGuard
from blockcache.engines.stats import Counts
from blockcache.errors import EngineError
from blockcache.models.noise import check_noise, draw_all
from blockcache.models.port import Target, check_eval_mode
from blockcache.observations import check_observation
from blockcache.schedule import Schedule


class Runner(Protocol):
    """obs (B, n_obs, obs) in robot units, noise (1 + draws, B, horizon, D) -> what `predict_action` returns."""

    def __call__(self, obs: Tensor, noise: Tensor) -> dict[str, Tensor]: ...


def cut_for(policy: CompiledPolicy, output: str) -> CompiledPolicy:
    """With output="action" the tokens behind the executed slice are left out; they cannot influence it."""
    if output == "chunk":
        return policy
    if not policy.causal:
        raise EngineError('output="action" needs causal attention, which this policy lacks; use output="chunk"')
    return policy.cut(policy.executed[1])


def attach_runner(
    target: Target, policy: CompiledPolicy, runner: Runner, schedule: Schedule, counts: Counts
) -> Patches:
    """Replace the policy's `predict_action` by the runner."""
    guard, settings = WeightsGuard(target.policy), _settings(target.policy)
    like = policy.input_b
    computed = {name: len(steps) for name, steps in schedule.updates.items()}
    reused = {name: schedule.steps - count for name, count in computed.items()}

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        name = next(iter(inspect.signature(original).parameters))  # the public code's is obs_dict

        def predict_action(
            *given: Any, generator: torch.Generator | None = None, noise: Tensor | None = None, **named: Any
        ) -> dict[str, Tensor]:
            if len(given) + len(named) != 1 or set(named) - {name}:
                raise TypeError(f"predict_action takes one observation ({name}), got {[*map(type, given), *named]}")
            (obs,) = given or named.values()
            check_eval_mode(target.policy)
            guard.check()
            if _settings(target.policy) != settings:
                raise EngineError(
                    "the policy's sampler or sizes changed after this engine was built; disable() and accelerate again"
                )
            observed = check_observation(obs, policy.n_obs_steps, policy.obs_dim, like)
            chunk = policy.chunk(len(observed))
            drawn = (
                draw_all(policy.sampler, chunk, like, generator)
                if noise is None
                else check_noise(noise, policy.sampler, chunk, like)
            )
            result = runner(observed, drawn)
            counts.add(computed, reused)
            return result

        return predict_action

    patches = Patches()
    patches.replace(target.policy, "predict_action", replacement)
    return patches


def _settings(policy: Any) -> list[Any]:
    """What a policy's own `predict_action` looks up in every call, and an engine only once."""
    names = ("num_inference_steps", "horizon", "n_obs_steps", "n_action_steps")
    sampler = getattr(policy, "sampler", None)  # ours; a foreign policy holds a scheduler of diffusers'
    if sampler is None:
        sampler = type(policy.noise_scheduler), dict(policy.noise_scheduler.config)
    given = dict(getattr(policy, "kwargs", None) or {})  # the public code hands these to the scheduler's step
    only = getattr(policy, "pred_action_steps_only", False)
    return [*(getattr(policy, name) for name in names), sampler, given, only]
