"""What the loop and onnx engines share: they replace `predict_action` as a whole and run a copy of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from blockcache.engines.compiled import CompiledPolicy
from blockcache.engines.guard import WeightsGuard
from blockcache.engines.stats import Counts
from blockcache.errors import EngineError
from blockcache.noise import check_noise, draw_all
from blockcache.observations import check_observation
from blockcache.patching import Patches
from blockcache.schedule import Schedule
from blockcache.target import Target, check_eval_mode


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
    guard = WeightsGuard(target.policy)
    like = policy.input_b
    computed = {name: len(steps) for name, steps in schedule.updates.items()}
    reused = {name: schedule.steps - count for name, count in computed.items()}

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def predict_action(
            obs: Any, *, generator: torch.Generator | None = None, noise: Tensor | None = None
        ) -> dict[str, Tensor]:
            check_eval_mode(target.policy)
            guard.check()
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
