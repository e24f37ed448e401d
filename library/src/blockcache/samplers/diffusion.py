"""The samplers: DDPM, DDIM, DPM-Solver++ and SDE-DPM-Solver++ of a diffusion, Euler of a flow.

The numbers and the timesteps are those of diffusers 0.42, quirks included. They are computed in single precision,
operation by operation as in torch, and only then widened: `1 - now / after` cancels, and in double precision a small
beta would be 4e-4 away from that of diffusers. What is left is torch's square root, which on some machines is off by an
ulp; here it is not. Not known here: dynamic thresholding, learned variances, Karras and other respaced sigmas, DPM-Solver's
third order and Heun's solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.samplers.base import DiffusersForm, SamplerConfig, number, one_of
from blockcache.samplers.coefficients import Array, SamplerTable

Singles: TypeAlias = npt.NDArray[np.float32]

SPACINGS = one_of("leading", "linspace", "trailing")
SWITCH = one_of(True, False)
TRAINING = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "prediction_type")
CLIPPING = ("clip_sample", "clip_sample_range")


@dataclass(frozen=True, kw_only=True)
class Diffusion(SamplerConfig):
    """What the samplers of a diffusion share: noise levels, timesteps, x0 and eps from the output.

    Settings are named as in diffusers. `beta_start` and `beta_end` do nothing in "squaredcos_cap_v2", as there.
    `timesteps` fall and lie in 0..num_train_timesteps - 1. Between two whole ones the log-SNR is interpolated linearly.
    They take the place of `timestep_spacing` and `steps_offset`, which then do nothing.
    """

    trained_for: ClassVar[str] = "diffusion"
    kept: ClassVar[tuple[str, ...]] = (*TRAINING, *CLIPPING)

    num_train_timesteps: int = field(default=100, metadata=number(int, 2, 1_000_000))
    beta_schedule: str = field(
        default="squaredcos_cap_v2", metadata=one_of("squaredcos_cap_v2", "linear", "scaled_linear")
    )
    beta_start: float = field(default=1e-4, metadata=number(float, 0, 1))
    beta_end: float = field(default=0.02, metadata=number(float, 0, 1))
    prediction_type: str = field(default="epsilon", metadata=one_of("epsilon", "sample", "v_prediction"))
    clip_sample: bool = field(default=True, metadata=SWITCH)
    clip_sample_range: float = field(default=1.0, metadata=number(float, 0, 1_000_000))
    timestep_spacing: str = field(default="leading", metadata=SPACINGS)
    steps_offset: int = field(default=0, metadata=number(int, 0, 1_000_000))

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.timestep_spacing == "leading" or self.steps_offset == 0
        self.require("steps_offset", counts, f"0, as {self.timestep_spacing!r} spacing does not use it")
        train, power = self.num_train_timesteps, self.signal_power()
        self.require_order(lambda t: 0 <= t <= train - 1, f"in 0..{train - 1}", rising=False)
        t = self.times()
        # Besides too many steps this refuses those "trailing" ones where a rounding error gives diffusers one
        # timestep too many, -1 (29 steps of 100, for example).
        distinct = t[0] < train and t[-1] >= 0 and bool(np.all(np.diff(t) < 0))
        words = f"a number that gives distinct timesteps in 0..{train - 1} ({self.timestep_spacing!r} spacing)"
        self.require("num_inference_steps", distinct, words)
        falling = power[0] < 1 and power[-1] > 0 and bool(np.all(np.diff(power) < 0))
        words = f"betas that take some signal at each of {train} timesteps, but never all (single precision)"
        self.require("beta_schedule", falling, words)
        apart = bool(np.all(np.diff(self.power_at(t)) > 0))
        self.require("timesteps", apart, "numbers far enough apart for different noise levels (single precision)")

    def times(self) -> Array:
        """Where they are not given and repeat or leave the range, the config refuses them."""
        if self.timesteps is not None:
            return np.array(self.timesteps, dtype=np.float64)
        train, steps = self.num_train_timesteps, self.num_inference_steps
        points = steps + self.left_out
        if self.timestep_spacing == "trailing":
            return np.round(np.arange(train, 0, -train / steps)) - 1
        if self.timestep_spacing == "linspace":
            rising = np.linspace(0, train - 1, points).round()
        else:
            rising = np.arange(points, dtype=np.float64) * (train // points) + self.steps_offset
        return rising[::-1][:steps].copy()

    @property
    def left_out(self) -> int:
        """How many of the lowest evenly spaced points are no steps."""
        return 0

    def signal_power(self) -> Singles:
        """The share of the clean sample's variance left at each training timestep ("alphas_cumprod")."""
        train = self.num_train_timesteps
        if self.beta_schedule == "squaredcos_cap_v2":
            left = np.cos((np.arange(train + 1) / train + 0.008) / 1.008 * np.pi / 2) ** 2
            betas = np.minimum(1 - left[1:] / left[:-1], 0.999).astype(np.float32)
        elif self.beta_schedule == "linear":
            betas = _linspace(self.beta_start, self.beta_end, train)
        else:
            betas = _linspace(self.beta_start**0.5, self.beta_end**0.5, train) ** 2
        # torch multiplies up in double precision and rounds each product.
        return np.cumprod((1 - betas).astype(np.float64)).astype(np.float32)

    def power_at(self, timesteps: Array) -> Singles:
        """The same at any timesteps; whole ones have exactly their own."""
        power, low = self.signal_power(), np.floor(timesteps).astype(np.int64)
        high, share = np.minimum(low + 1, len(power) - 1), timesteps - low
        log_snr = np.log(power.astype(np.float64)) - np.log1p(-power.astype(np.float64))
        between = log_snr[low] + share * (log_snr[high] - log_snr[low])
        return np.where(share == 0, power[low], 1 / (1 + np.exp(-between))).astype(np.float32)

    def fill(
        self, timesteps: Array, signal: Singles, noise: Singles, draws: Sequence[bool], **update: Any
    ) -> SamplerTable:
        """A table from the levels of signal and noise at each step and the columns of its update."""
        columns = update | _prediction(self.prediction_type, signal.astype(np.float64), noise.astype(np.float64))
        return SamplerTable(timesteps=timesteps, draws=tuple(draws), clip=self.clip, **columns)

    @property
    def clip(self) -> float | None:
        """How far x0 may be from 0, None for any distance."""
        return self.clip_sample_range if self.clip_sample else None


@dataclass(frozen=True, kw_only=True)
class DDIM(Diffusion):
    """As diffusers' `DDIMScheduler` does it: deterministic, or with `eta` partly stochastic.

    eta: how much of DDPM's noise a step adds, 0 to 1. set_alpha_to_one: end at the clean sample, not at t = 0.
    """

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


@dataclass(frozen=True, kw_only=True)
class DDPM(Diffusion):
    """Ancestral sampling, as diffusers' `DDPMScheduler` does it. variance_type: of the noise that a step adds."""

    type: ClassVar[str] = "ddpm"
    in_diffusers: ClassVar[DiffusersForm | None] = DiffusersForm("DDPMScheduler")
    kept: ClassVar[tuple[str, ...]] = (*Diffusion.kept, "variance_type")

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


@dataclass(frozen=True, kw_only=True)
class DPMSolver(Diffusion):
    """As diffusers' `DPMSolverMultistepScheduler` does it with the midpoint solver ("2M").

    Clipping x0 is an addition: diffusers' scheduler never clips, and is used only while `clip_sample` is off. A policy that
    predicts noise under the cosine schedule needs it, or a small error at the first timestep grows a thousandfold.

    solver_order: 1, or 2 from two neighbouring x0. lower_order_final: the last of fewer than 15 steps is of order 1.
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


@dataclass(frozen=True, kw_only=True)
class Euler(SamplerConfig):
    """Euler's method for flow matching: the denoiser's output is a velocity, times rise from 0 (noise) to 1 (clean).

    K equal steps, or `timesteps` that rise and lie from 0 to below 1; the last step ends at 1. There is no form of it in
    diffusers: `FlowMatchEulerDiscreteScheduler` hands the denoiser times that are multiplied by its number of training
    steps, and spaces K steps equally only if it was made for K training steps.
    """

    type: ClassVar[str] = "euler"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_order(lambda t: 0 <= t < 1, "from 0 to below 1", rising=True)

    def times(self) -> Array:
        if self.timesteps is not None:
            return np.array(self.timesteps, dtype=np.float64)
        return np.arange(self.num_inference_steps) / self.num_inference_steps

    def tabulate(self) -> SamplerTable:
        """x' = x + (t' - t)*v, with v in the place of eps; x0 = x + (1 - t)*v is where v points to."""
        times = self.times()
        stride = np.diff(np.append(times, 1.0))
        columns: dict[str, Any] = {"a": 1.0, "e": stride, "eps_out": 1.0, "x0_x": 1.0, "x0_out": 1 - times}
        return SamplerTable(timesteps=times, draws=(False,) * len(times), clip=None, **columns)


def _prediction(prediction_type: str, signal: Array, noise: Array) -> dict[str, Any]:
    """x0 and eps from x = signal*x0 + noise*eps and the denoiser's output; v is signal*eps - noise*x0."""
    if prediction_type == "epsilon":
        return {"x0_x": 1 / signal, "x0_out": -noise / signal, "eps_out": 1.0}
    if prediction_type == "sample":
        return {"x0_out": 1.0, "eps_x": 1 / noise, "eps_out": -signal / noise}
    return {"x0_x": signal, "x0_out": -noise, "eps_x": noise, "eps_out": signal}


def _linspace(start: float, stop: float, count: int) -> Singles:
    """torch.linspace in single precision: from both ends, one rounding per point (fused multiply-add)."""
    first, last = np.float32(start), np.float32(stop)
    stride = np.float64((last - first) / np.float32(count - 1))
    i = np.arange(count)
    points = np.where(i < count // 2, first + stride * i, last - stride * (count - 1 - i))
    return points.astype(np.float32)
