"""What a denoiser learns: how clean actions and noise are mixed at a time, and what its output is compared with.

All of it follows from the sampler that the policy will generate with. Knows nothing of policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from blockcache.models.sampling import make_scheduler
from blockcache.samplers import Diffusion, Euler, SamplerConfig
from blockcache_lab.training.data import TrainingError


class Objective(ABC):
    """Clean actions and noise (B, T, A), times (B,)."""

    predicts: str
    """What the denoiser's output is, for the record."""

    @abstractmethod
    def draw(self, count: int) -> Tensor:
        """Times at random, from torch's global generator."""

    @abstractmethod
    def spread(self, rows: Tensor) -> Tensor:
        """Times for a validation, always the same for the same rows."""

    @abstractmethod
    def mix(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the denoiser is shown."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor) -> Tensor:
        """What it should say."""


@dataclass(frozen=True, eq=False)
class Denoising(Objective):
    """A diffusion, whose denoiser finds the noise ("epsilon") or the clean actions ("sample")."""

    predicts: str
    signal: Tensor  # (K, 1, 1): how much of the clean sample is left at a timestep
    sigma: Tensor  # (K, 1, 1): and how much noise is in it

    def draw(self, count: int) -> Tensor:
        return torch.randint(0, len(self.signal), (count,))

    def spread(self, rows: Tensor) -> Tensor:
        return rows % len(self.signal)

    def mix(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return self.signal[t] * clean + self.sigma[t] * noise

    def target(self, clean: Tensor, noise: Tensor) -> Tensor:
        return noise if self.predicts == "epsilon" else clean


class Flow(Objective):
    """A straight way from noise at time 0 to clean actions at time 1; the denoiser finds its velocity."""

    predicts = "velocity"

    def draw(self, count: int) -> Tensor:
        return torch.rand(count)

    def spread(self, rows: Tensor) -> Tensor:
        return (rows % 100) / 100

    def mix(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return torch.lerp(noise, clean, t.reshape(-1, 1, 1))

    def target(self, clean: Tensor, noise: Tensor) -> Tensor:
        return clean - noise


def objective_of(sampler: SamplerConfig) -> Objective:
    """What the denoiser behind a sampler has to learn."""
    if isinstance(sampler, Euler):
        return Flow()
    if not isinstance(sampler, Diffusion) or sampler.prediction_type not in ("epsilon", "sample"):
        raise TrainingError(
            "training knows denoisers that predict noise, clean samples or the velocity of a flow, got the sampler "
            f"{sampler.to_dict()}"
        )
    power = make_scheduler(sampler).alphas_cumprod.reshape(-1, 1, 1)
    return Denoising(sampler.prediction_type, power.sqrt(), (1 - power).sqrt())
