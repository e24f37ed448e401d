"""DDPM: ancestral sampling, as diffusers' `DDPMScheduler` does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from blockcache.samplers.base import DiffusersForm, one_of
from blockcache.samplers.coefficients import SamplerTable
from blockcache.samplers.diffusion import Diffusion


@dataclass(frozen=True, kw_only=True)
class DDPM(Diffusion):
    """variance_type: of the noise that a step adds."""

    type: ClassVar[str] = "ddpm"
    in_diffusers: ClassVar[DiffusersForm | None] = DiffusersForm("DDPMScheduler")

    variance_type: str = field(default="fixed_small", metadata=one_of("fixed_small", "fixed_small_log", "fixed_large"))

    def tabulate(self) -> SamplerTable:
        """Mean and variance of the posterior between neighbouring timesteps; the last step ends at the clean sample."""
        timesteps = self.times()
        now = self.power_at(timesteps)
        after = np.append(now[1:], np.float32(1))
        alpha = now / after
        beta = 1 - alpha
        variance = np.maximum((1 - after) / (1 - now) * beta, np.float32(1e-20))
        # "fixed_small_log" is the same standard deviation, which diffusers merely takes through a logarithm.
        std = np.sqrt(beta if self.variance_type == "fixed_large" else variance)
        a, b = np.sqrt(alpha) * (1 - after) / (1 - now), np.sqrt(after) * beta / (1 - now)
        # A last step at t > 0 ("trailing", or an offset) adds noise and draws it; a step at t = 0 does neither.
        draws = timesteps > 0
        return self.fill(timesteps, np.sqrt(now), np.sqrt(1 - now), draws.tolist(), a=a, b=b, s=np.where(draws, std, 0))
