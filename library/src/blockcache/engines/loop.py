"""The loop engine: the walk on the torch backend. Knows nothing of policies or of where a schedule came from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blockcache.engines.torch_backend import Constants, TorchBackend
from blockcache.engines.walk import generate
from blockcache.models.program import Program
from blockcache.observations.tensors import largest
from blockcache.samplers import SamplerTable
from blockcache.schedule.plan import Plan
from blockcache_runtime.checks import check_generation


class Loop:
    """`loop(obs, noise)` -> actions in robot units. Several threads may call it at once."""

    def __init__(self, program: Program, plan: Plan, sampler: SamplerTable) -> None:
        self.program = program
        self.plan = plan
        self.sampler = sampler
        self.constants = Constants(program)

    def __call__(self, obs: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        """obs by name, each (B, ...), in robot units; noise (1 + draws, B, T, D)."""
        found = self.unchecked(obs, noise)
        seen = [found.pop(name) for name in ("norms", "features") if name in found]
        check_generation(largest(seen), lambda: largest(obs))
        return found

    @torch.no_grad()
    def unchecked(self, obs: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        """The same with `norms`, at which nobody has looked yet: nothing is copied to the host."""
        backend = TorchBackend(self.constants, noise.shape[1])
        return generate(backend, self.program, self.plan, self.sampler, by_moment(obs, self.program), noise)


def by_moment(obs: Mapping[str, Tensor], program: Program) -> dict[str, Tensor]:
    """As the walk takes an observation: of cameras the moments come before the batch."""
    return {name: value.transpose(0, 1) if name in program.cameras else value for name, value in obs.items()}
