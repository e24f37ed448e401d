"""The exact savings of the loop engine, added one by one to the candidates of a benchmark. Knows no family.

The constant coefficients of the sampler are one of them: `DiffusersLoop` runs the same program with diffusers' scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockcache.compare.bench_candidates import CandidateMaker, fixed_generator, on_threads
from blockcache.compare.candidates import program_flops
from blockcache.engines.loop import Loop, TorchBackend, by_moment
from blockcache.engines.rehearsal import rehearsed_build
from blockcache.engines.walk import denoiser_output, perceive
from blockcache.models.sampling import denoise
from blockcache.samplers import SamplerConfig
from blockcache.schedule import Reuse
from blockcache_lab.studies.savings_programs import without_savings


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
            return found.view(batch, tokens, -1)

        chunk = (batch, tokens, program.chunk[1])
        given = None if noise is None else noise[:, :, :tokens]
        x = denoise(self.sampler, output, chunk, first, generator=generator, noise=given)
        actions = program.select(backend, program.finish(backend, x.flatten(0, 1)), conditions)
        action = {"action": actions[:, slice(*program.executed)]}
        return {**action, "action_pred": actions} if program.whole else action


def add_savings(maker: CandidateMaker) -> None:
    """Full precision in the loop engine with its exact savings switched off, then on one by one, as candidates."""
    port, full = maker.port, maker.everything
    if "loop and onnx" in maker.unavailable:
        return
    if port.begins_after_encoder:
        maker.unavailable["savings"] = "they begin behind the policy's own encoder, which all other rows run too"
        return
    built = rehearsed_build(port, full, "loop")
    assert port.sampler is not None
    calls: dict[str, tuple[Any, Any]] = {}
    for name, program in without_savings(port, built.program).items():
        loop = DiffusersLoop(Loop(program, built.plan, built.sampler), port.sampler)
        calls[name] = on_threads(1, partial(_with_diffusers, maker, loop, maker.observed(program))), program
    loops = {"+ constant sampler": built}
    if built.program.causal:
        loops["+ executed actions only"] = built.actions_only()
    for name, kept in loops.items():
        calls[name] = maker.drawing(Loop(kept.program, kept.plan, kept.sampler), kept), kept.program
    for name, (call, program) in calls.items():
        maker.add(f"savings: {name}", "loop", 1, call, program_flops(program, full.steps, full), saving=name)


def _with_diffusers(maker: CandidateMaker, loop: DiffusersLoop, obs: Mapping[str, Tensor]) -> Any:
    """The sampler draws its noise itself here: handing it over takes diffusers a detour of its own."""
    return maker.port.entry_result(loop(obs, generator=fixed_generator()))
