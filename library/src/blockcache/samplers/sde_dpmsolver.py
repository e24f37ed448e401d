"""SDE-DPM-Solver++: DPM-Solver++ that adds fresh noise at every step, as diffusers' `DPMSolverMultistepScheduler` does.

Its first order is DDPM's posterior ("fixed_small"), written in another way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from blockcache.samplers.base import DiffusersForm
from blockcache.samplers.coefficients import SamplerTable
from blockcache.samplers.dpmsolver import CLIPPING, DPMSolver


@dataclass(frozen=True, kw_only=True)
class SDEDPMSolver(DPMSolver):
    """Settings and levels of DPM-Solver++; the update is of the stochastic equation."""

    type: ClassVar[str] = "sde-dpmsolver++"
    in_diffusers: ClassVar[DiffusersForm | None] = DiffusersForm(
        "DPMSolverMultistepScheduler", CLIPPING, {"algorithm_type": "sde-dpmsolver++"}
    )

    def tabulate(self) -> SamplerTable:
        timesteps = self.times()
        signal, noise, h = self.levels(timesteps)
        gain = signal[1:].astype(np.float64) * -np.expm1(-2 * h)
        past = self.past(gain, h)
        a = noise[1:] / noise[:-1] * np.exp(-h)
        s = noise[1:] * np.sqrt(-np.expm1(-2 * h))
        draws = [True] * len(timesteps)  # at the last step too, where s is 0
        return self.fill(timesteps, signal[:-1], noise[:-1], draws, a=a, b=gain + past, c=-past, s=s)
