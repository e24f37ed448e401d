"""The exact savings of the whole-loop engines, switched off one by one, so that each can be measured by itself.

Only for benchmarks and tests: every variant computes the same actions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockcache.engines.compiled import CompiledPolicy
from blockcache.engines.loop import Loop, split_heads
from blockcache.models.sampling import denoise
from blockcache.samplers import SamplerConfig


class ProjectedMemory:
    """Condition tokens are encoded once, but projected to keys and values at every use."""

    def __init__(self, policy: CompiledPolicy, obs: Tensor) -> None:
        self.policy = policy
        self.observed = policy.encode(obs @ policy.obs_w + policy.obs_b)
        self.time = policy.encode(policy.time_tokens)

    def tokens(self, step: int) -> Tensor:
        """The encoded condition tokens of a step, (B, 1 + n_obs, d)."""
        return torch.cat((self.time[step].expand(len(self.observed), 1, -1), self.observed), dim=1)

    def pair(self, layer: int, step: int) -> tuple[Tensor, Tensor]:
        width = 2 * self.policy.width
        own = slice(layer * width, (layer + 1) * width)
        projected = self.tokens(step) @ self.policy.memory_w[:, own] + self.policy.memory_b[own]
        pair = split_heads(self.policy, projected)
        return pair[0], pair[1]


class EncodedMemory(ProjectedMemory):
    """Condition tokens are encoded anew at every step, as the plain policy does."""

    def __init__(self, policy: CompiledPolicy, obs: Tensor) -> None:
        self.policy = policy
        self.observed = obs @ policy.obs_w + policy.obs_b
        self._step, self._encoded = -1, obs

    def tokens(self, step: int) -> Tensor:
        if step != self._step:
            time = self.policy.time_tokens[step].expand(len(self.observed), 1, -1)
            self._step, self._encoded = step, self.policy.encode(torch.cat((time, self.observed), dim=1))
        return self._encoded


class DiffusersLoop:
    """The loop with diffusers' scheduler instead of constant coefficients."""

    def __init__(self, loop: Loop, sampler: SamplerConfig) -> None:
        self.loop = loop
        self.sampler = sampler

    @torch.no_grad()
    def __call__(
        self, obs: Tensor, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        policy, generation, steps = self.loop.policy, self.loop.start(obs), iter(range(self.loop.plan.steps))
        chunk = (len(obs), policy.tokens, policy.sample_dim)
        x = denoise(
            self.sampler,
            lambda x, t: generation.denoise(next(steps), x),
            chunk,
            obs,
            generator=generator,
            noise=None if noise is None else noise[:, :, : policy.tokens],
        )
        return policy.finish(x)
