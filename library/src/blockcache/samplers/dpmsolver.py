"""DPM-Solver++ and SDE-DPM-Solver++, as diffusers' `DPMSolverMultistepScheduler` does them with the midpoint solver ("2M").

Clipping x0 is an addition: diffusers' scheduler never clips, and is used only while `clip_sample` is off. A policy that
predicts noise under the cosine schedule needs it, or what little is wrong at the first timestep is blown up a thousandfold.
Not known here: the third order, Heun's solver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from blockcache.samplers.base import DiffusersForm, one_of
from blockcache.samplers.coefficients import Array, SamplerTable
from blockcache.samplers.diffusion import SPACINGS, SWITCH, Diffusion, Singles

CLIPPING = ("clip_sample", "clip_sample_range")


@dataclass(frozen=True, kw_only=True)
class DPMSolver(Diffusion):
    """solver_order: 1, or 2 from two neighbouring x0. lower_order_final: the last of fewer than 15 steps is of order 1.

    final_sigmas_type: the last step ends at the clean sample ("zero") or at the noise of t = 0 ("sigma_min").
    """

    type: ClassVar[str] = "dpmsolver++"
    in_diffusers: ClassVar[DiffusersForm | None] = DiffusersForm(
        "DPMSolverMultistepScheduler", CLIPPING, {"algorithm_type": "dpmsolver++"}
    )

    clip_sample: bool = field(default=False, metadata=SWITCH)
    timestep_spacing: str = field(default="linspace", metadata=SPACINGS)
    solver_order: int = field(default=2, metadata=one_of(1, 2))
    lower_order_final: bool = field(default=True, metadata=SWITCH)
    final_sigmas_type: str = field(default="zero", metadata=one_of("zero", "sigma_min"))

    @property
    def left_out(self) -> int:
        """One point more is laid out, the lowest, where the last step ends."""
        return 1

    def tabulate(self) -> SamplerTable:
        timesteps = self.times()
        signal, noise, h = self.levels(timesteps)
        gain = signal[1:].astype(np.float64) * -np.expm1(-h)
        past = self.past(gain, h)
        draws = [False] * len(timesteps)
        a = noise[1:] / noise[:-1]
        return self.fill(timesteps, signal[:-1], noise[:-1], draws, a=a, b=gain + past, c=-past)

    def levels(self, timesteps: Array) -> tuple[Singles, Singles, Array]:
        """Signal and noise at each step and where the last one ends (K + 1,), and strides in log(signal / noise) (K,)."""
        power = np.append(self.power_at(timesteps), self.signal_power()[0])
        sigma = np.sqrt((1 - power) / power)
        if self.final_sigmas_type == "zero":
            sigma[-1] = 0
        signal = 1 / np.sqrt(sigma**2 + 1)
        with np.errstate(divide="ignore"):
            h = -np.diff(np.log(sigma.astype(np.float64)))  # infinite to sigma = 0
        return signal, sigma * signal, h

    def past(self, gain: Array, h: Array) -> Array:
        """What the second order adds for x0 and takes away for the x0 before it."""
        steps = len(h)
        past = np.zeros(steps)
        if self.solver_order == 2:
            first_order_end = self.final_sigmas_type == "zero" or (self.lower_order_final and steps < 15)
            stop = steps - 1 if first_order_end else steps
            past[1:stop] = gain[1:stop] * 0.5 * h[1:stop] / h[: stop - 1]
        return past


@dataclass(frozen=True, kw_only=True)
class SDEDPMSolver(DPMSolver):
    """DPM-Solver++ that adds fresh noise at every step. Its first order is DDPM's posterior ("fixed_small"), written
    in another way."""

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
