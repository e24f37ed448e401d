"""DDIM, as diffusers' `DDIMScheduler` does it: deterministic, or with `eta` partly stochastic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from blockcache.samplers.base import DiffusersForm, number
from blockcache.samplers.coefficients import SamplerTable
from blockcache.samplers.diffusion import SWITCH, Diffusion


@dataclass(frozen=True, kw_only=True)
class DDIM(Diffusion):
    """eta: how much of DDPM's noise a step adds, 0 to 1. set_alpha_to_one: end at the clean sample, not at t = 0."""

    type: ClassVar[str] = "ddim"
    in_diffusers: ClassVar[DiffusersForm | None] = DiffusersForm("DDIMScheduler", lacks=("eta",))  # its step takes eta

    eta: float = field(default=0.0, metadata=number(float, 0, 1))
    set_alpha_to_one: bool = field(default=True, metadata=SWITCH)

    def tabulate(self) -> SamplerTable:
        """Towards x0 and along eps: to the next timestep if they are listed, else as diffusers by a fixed stride, even
        where the next timestep is another ("linspace")."""
        timesteps, power = self.times(), self.signal_power()
        now, end = self.power_at(timesteps), np.float32(1) if self.set_alpha_to_one else power[0]
        if self.timesteps is not None:
            after = np.append(now[1:], end)
        else:
            target = timesteps.astype(np.int64) - self.num_train_timesteps // self.num_inference_steps
            after = np.where(target >= 0, power[np.maximum(target, 0)], end)
        std = np.float32(self.eta) * np.sqrt((1 - after) / (1 - now) * (1 - now / after))
        along = np.sqrt(np.maximum(1 - after - std**2, 0))  # next to a clean end the difference may round below zero
        draws = [self.eta > 0] * len(timesteps)
        return self.fill(timesteps, np.sqrt(now), np.sqrt(1 - now), draws, b=np.sqrt(after), e=along, s=std)
