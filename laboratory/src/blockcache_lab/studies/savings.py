"""The loop engine with diffusers' scheduler instead of constant coefficients, so that this saving can be measured too.

Only for benchmarks and tests: it computes the same actions. Knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blockcache.engines.loop import Loop, TorchBackend, by_moment
from blockcache.engines.walk import denoiser_output, perceive
from blockcache.models.sampling import denoise
from blockcache.samplers import SamplerConfig
from blockcache.schedule import Reuse


class DiffusersLoop:
    """`loop(obs, noise)` -> actions in robot units, or with noise that the scheduler draws from a generator."""

    def __init__(self, loop: Loop, sampler: SamplerConfig) -> None:
        self.loop = loop
        self.sampler = sampler

    @torch.no_grad()
    def __call__(
        self, obs: Mapping[str, Tensor], noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        program, plan = self.loop.program, self.loop.plan
        first = next(iter(obs.values()))
        batch, tokens = len(first), program.tokens
        backend = TorchBackend(self.loop.constants, batch)
        shown, _ = perceive(backend, program, by_moment(obs, program))
        conditions, reuse = program.conditions(backend, shown), Reuse(plan, backend.add)
        steps = iter(range(plan.steps))

        def output(x: Tensor, t: Tensor) -> Tensor:
            step = next(steps)
            found = denoiser_output(backend, program, plan.program[step], reuse, conditions, step, x.flatten(0, 1))
            reuse.end_step(step)
            return found.view(batch, tokens, -1)  # type: ignore[no-any-return]

        chunk = (batch, tokens, program.chunk[1])
        given = None if noise is None else noise[:, :, :tokens]
        x = denoise(self.sampler, output, chunk, first, generator=generator, noise=given)
        actions = program.select(backend, program.finish(backend, x.flatten(0, 1)), conditions)
        action = {"action": actions[:, slice(*program.executed)]}
        return {**action, "action_pred": actions} if program.whole else action
