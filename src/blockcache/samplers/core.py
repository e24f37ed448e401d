"""Samplers as constants: one frozen table of coefficients for a whole denoising loop.

Every step of every sampler here is the same line of arithmetic,

    x' = a*x + b*x0 + e*eps + c*x0_prev + s*noise

with `x0` the predicted clean sample after clipping, `eps` the noise as predicted (before clipping) and
`x0_prev` the clipped `x0` of the step before. `table` writes down the coefficients of all steps, so that an
engine can unroll the loop with constants; `step` is the reference arithmetic.

The numbers, the timesteps and the order of the noise draws are those of diffusers 0.42, quirks included:
`DDPMScheduler`, `DDIMScheduler` and `DPMSolverMultistepScheduler` ("dpmsolver++" with the midpoint solver).
Not known here: torch, the denoiser, how noise is drawn, dynamic thresholding, learned variances, Karras and
other respaced sigmas, stochastic or third-order DPM-Solver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.errors import SamplerError

Array = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_Singles = npt.NDArray[np.float32]

_CHOICES: dict[str, tuple[object, ...]] = {
    "type": ("ddpm", "ddim", "dpmsolver++"),
    "beta_schedule": ("squaredcos_cap_v2", "linear", "scaled_linear"),
    "prediction_type": ("epsilon", "sample", "v_prediction"),
    "clip_sample": (True, False),
    "variance_type": ("fixed_small", "fixed_small_log", "fixed_large"),
    "set_alpha_to_one": (True, False),
    "timestep_spacing": ("leading", "linspace", "trailing"),
    "solver_order": (1, 2),
    "lower_order_final": (True, False),
    "final_sigmas_type": ("zero", "sigma_min"),
}
_NUMBERS: dict[str, tuple[type, float, float]] = {  # type, lowest, highest
    "num_train_timesteps": (int, 2, 1_000_000),
    "num_inference_steps": (int, 1, 1_000_000),
    "steps_offset": (int, 0, 1_000_000),
    "beta_start": (float, 0, 1),
    "beta_end": (float, 0, 1),
    "clip_sample_range": (float, 0, 1_000_000),
    "eta": (float, 0, 1),
}
_BELONGS_TO = {
    "variance_type": "ddpm",
    "eta": "ddim",
    "set_alpha_to_one": "ddim",
    "solver_order": "dpmsolver++",
    "lower_order_final": "dpmsolver++",
    "final_sigmas_type": "dpmsolver++",
}
_COLUMNS = ("a", "b", "e", "c", "s", "x0_x", "x0_out", "eps_x", "eps_out")


@dataclass(frozen=True)
class SamplerConfig:
    """The settings of a sampler, named as in diffusers and validated on creation.

    `clip_sample` and `timestep_spacing` left at None become the type's default: True and "leading" for DDPM
    and DDIM, False and "linspace" for DPM-Solver++, which never clips. A setting of another type has to stay
    at its default. `beta_start` and `beta_end` do nothing in "squaredcos_cap_v2", as in diffusers.
    """

    type: str
    num_train_timesteps: int = 100
    num_inference_steps: int = 100
    beta_schedule: str = "squaredcos_cap_v2"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    prediction_type: str = "epsilon"
    clip_sample: bool | None = None
    clip_sample_range: float = 1.0
    timestep_spacing: str | None = None
    steps_offset: int = 0
    variance_type: str = "fixed_small"
    eta: float = 0.0
    set_alpha_to_one: bool = True
    solver_order: int = 2
    lower_order_final: bool = True
    final_sigmas_type: str = "zero"

    def __post_init__(self) -> None:
        solver = self.type == "dpmsolver++"
        if self.clip_sample is None:
            object.__setattr__(self, "clip_sample", not solver)
        if self.timestep_spacing is None:
            object.__setattr__(self, "timestep_spacing", "linspace" if solver else "leading")
        for name, choices in _CHOICES.items():
            # 1 == True and 2 == 2.0 in Python, so the type is compared too.
            same = [choice for choice in choices if type(choice) is type(getattr(self, name))]
            self._require(name, getattr(self, name) in same, "one of " + ", ".join(map(repr, choices)))
        for name, (kind, low, high) in _NUMBERS.items():
            value = getattr(self, name)
            number = isinstance(value, (int, kind)) and not isinstance(value, bool)
            words = f"{'an int' if kind is int else 'a number'} from {low} to {high}"
            self._require(name, number and low <= value <= high, words)
            object.__setattr__(self, name, kind(value))
        for field in fields(self):
            if _BELONGS_TO.get(field.name, self.type) != self.type:
                ours = getattr(self, field.name) == field.default
                self._require(field.name, ours, f"{field.default!r}, as {self.type} has no such setting")
        self._require("clip_sample", not (solver and self.clip_sample), "False, as dpmsolver++ does not clip")
        counts = self.timestep_spacing == "leading" or self.steps_offset == 0
        self._require("steps_offset", counts, f"0, as {self.timestep_spacing!r} spacing does not use it")
        train, t, power = self.num_train_timesteps, _timesteps(self), _signal_power(self)
        # Besides too many steps this refuses those "trailing" ones where a rounding error gives diffusers one
        # timestep too many, -1 (29 steps of 100, for example).
        distinct = t[0] < train and t[-1] >= 0 and bool(np.all(np.diff(t) < 0))
        words = f"a number that gives distinct timesteps in 0..{train - 1} ({self.timestep_spacing!r} spacing)"
        self._require("num_inference_steps", distinct, words)
        falling = power[0] < 1 and power[-1] > 0 and bool(np.all(np.diff(power) < 0))
        words = f"betas that take some signal at each of {train} timesteps, but never all (single precision)"
        self._require("beta_schedule", falling, words)

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise SamplerError(f"sampler setting {name}: expected {expected}; got {getattr(self, name)!r}")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> SamplerConfig:
        """The config of a plain dict, such as the "sampler" of a checkpoint; unknown settings are refused."""
        known = [field.name for field in fields(cls)]
        if not isinstance(settings, Mapping) or "type" not in settings:
            raise SamplerError(f"sampler settings: expected a dict with at least a 'type'; got {settings!r}")
        unknown = [str(name) for name in settings if name not in known]
        if unknown:
            raise SamplerError(f"sampler settings: expected only {known}; got unknown {unknown}")
        return cls(**settings)

    def to_dict(self) -> dict[str, str | int | float | bool]:
        """The settings that count for this type, in JSON types; `from_dict` gives back an equal config."""
        own = [field.name for field in fields(self) if _BELONGS_TO.get(field.name, self.type) == self.type]
        return {name: getattr(self, name) for name in own}


@dataclass(frozen=True, eq=False)
class SamplerTable:
    """The coefficients of K steps in execution order; every array has shape (K,) and is read-only.

    Step k predicts `x0 = x0_x*x + x0_out*out` and `eps = eps_x*x + eps_out*out` from the denoiser's output
    `out`, clips x0 to [-clip, clip] unless clip is None, and returns the sum in the module's docstring.
    `draws` says which steps take noise from the generator. That is not the same as `s != 0`: DDIM with
    eta > 0 draws at its last step too, where s is 0.
    """

    timesteps: npt.NDArray[np.int64]
    a: Array
    b: Array
    e: Array
    c: Array
    s: Array
    x0_x: Array
    x0_out: Array
    eps_x: Array
    eps_out: Array
    clip: float | None
    draws: tuple[bool, ...]

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def steps(self) -> int:
        """How often the denoiser is called, K."""
        return len(self.timesteps)

    @property
    def draw_count(self) -> int:
        """How many noises the steps draw, the initial one not counted."""
        return sum(self.draws)


def table(config: SamplerConfig) -> SamplerTable:
    """The coefficients of the whole loop.

    They are computed in single precision, operation by operation as in torch, and only then widened:
    `1 - now / after` cancels, and in double precision a small beta would be 4e-4 away from that of diffusers.
    What is left is torch's square root, which on some machines is off by an ulp; here it is not.
    """
    rule = {"ddpm": _ddpm, "ddim": _ddim, "dpmsolver++": _dpmsolver}[config.type]
    timesteps = _timesteps(config)
    signal, noise, columns = rule(config, timesteps, _signal_power(config))
    columns |= _prediction(config.prediction_type, signal.astype(np.float64), noise.astype(np.float64))
    zeros = np.zeros(len(timesteps))
    draws = timesteps > 0 if config.type == "ddpm" else zeros + config.eta > 0  # eta is 0 in dpmsolver++
    return SamplerTable(
        timesteps=timesteps,
        clip=config.clip_sample_range if config.clip_sample else None,
        draws=tuple(draws.tolist()),
        **{name: zeros + columns.get(name, 0.0) for name in _COLUMNS},
    )


def step(
    table: SamplerTable, k: int, x: Array, out: Array, x0_prev: Array | None, noise: Array | None
) -> tuple[Array, Array]:
    """One step of the loop in float64: the next sample, and the clipped x0 to hand to the next step."""
    if (table.c[k] != 0 and x0_prev is None) or (table.draws[k] and noise is None):
        raise SamplerError(f"step {k}: expected {'noise' if table.draws[k] else 'x0_prev'}; got None")
    x0 = table.x0_x[k] * x + table.x0_out[k] * out
    eps = table.eps_x[k] * x + table.eps_out[k] * out
    x0 = x0 if table.clip is None else np.clip(x0, -table.clip, table.clip)
    x_next = table.a[k] * x + table.b[k] * x0 + table.e[k] * eps
    x_next = x_next if x0_prev is None else x_next + table.c[k] * x0_prev
    return x_next if noise is None else x_next + table.s[k] * noise, x0


def _timesteps(config: SamplerConfig) -> _Ints:
    """The timesteps in execution order. Where they repeat or leave the range, the config refuses them."""
    train, steps = config.num_train_timesteps, config.num_inference_steps
    # DPM-Solver++ lays out one point more and leaves out the lowest, where its last step ends.
    points = steps + 1 if config.type == "dpmsolver++" else steps
    if config.timestep_spacing == "trailing":
        return np.round(np.arange(train, 0, -train / steps)).astype(np.int64) - 1
    if config.timestep_spacing == "linspace":
        rising = np.linspace(0, train - 1, points).round().astype(np.int64)
    else:
        rising = np.arange(points, dtype=np.int64) * (train // points) + config.steps_offset
    return rising[::-1][:steps].copy()


def _signal_power(config: SamplerConfig) -> _Singles:
    """The share of the clean sample's variance left at each training timestep ("alphas_cumprod")."""
    train = config.num_train_timesteps
    if config.beta_schedule == "squaredcos_cap_v2":
        left = np.cos((np.arange(train + 1) / train + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - left[1:] / left[:-1], 0.999).astype(np.float32)
    elif config.beta_schedule == "linear":
        betas = _linspace(config.beta_start, config.beta_end, train)
    else:
        betas = _linspace(config.beta_start**0.5, config.beta_end**0.5, train) ** 2
    # torch multiplies up in double precision and rounds each product.
    return np.cumprod((1 - betas).astype(np.float64)).astype(np.float32)


def _linspace(start: float, stop: float, count: int) -> _Singles:
    """torch.linspace in single precision: from both ends, one rounding per point (fused multiply-add)."""
    first, last = np.float32(start), np.float32(stop)
    stride = np.float64((last - first) / np.float32(count - 1))
    i = np.arange(count)
    points = np.where(i < count // 2, first + stride * i, last - stride * (count - 1 - i))
    return points.astype(np.float32)


def _prediction(prediction_type: str, signal: Array, noise: Array) -> dict[str, Any]:
    """x0 and eps from x = signal*x0 + noise*eps and the denoiser's output; v is signal*eps - noise*x0."""
    if prediction_type == "epsilon":
        return {"x0_x": 1 / signal, "x0_out": -noise / signal, "eps_out": 1.0}
    if prediction_type == "sample":
        return {"x0_out": 1.0, "eps_x": 1 / noise, "eps_out": -signal / noise}
    return {"x0_x": signal, "x0_out": -noise, "eps_x": noise, "eps_out": signal}


_Rule = tuple[_Singles, _Singles, dict[str, Any]]  # signal and noise level per step, columns of the update


def _ddpm(config: SamplerConfig, timesteps: _Ints, power: _Singles) -> _Rule:
    """Ancestral sampling: mean and variance of the posterior between neighbouring timesteps."""
    now, after = power[timesteps], np.append(power[timesteps[1:]], np.float32(1))
    alpha = now / after
    beta = 1 - alpha
    variance = np.maximum((1 - after) / (1 - now) * beta, np.float32(1e-20))
    # "fixed_small_log" is the same standard deviation, which diffusers merely takes through a logarithm.
    std = np.sqrt(beta if config.variance_type == "fixed_large" else variance)
    a, b = np.sqrt(alpha) * (1 - after) / (1 - now), np.sqrt(after) * beta / (1 - now)
    # A last step at t > 0 ("trailing", or an offset) adds noise and draws it; a step at t = 0 does neither.
    return np.sqrt(now), np.sqrt(1 - now), {"a": a, "b": b, "s": np.where(timesteps > 0, std, 0)}


def _ddim(config: SamplerConfig, timesteps: _Ints, power: _Singles) -> _Rule:
    """Towards x0 and along eps, by a fixed stride, even where the next timestep is another ("linspace")."""
    target = timesteps - config.num_train_timesteps // config.num_inference_steps
    end = np.float32(1) if config.set_alpha_to_one else power[0]
    now, after = power[timesteps], np.where(target >= 0, power[np.maximum(target, 0)], end)
    std = np.float32(config.eta) * np.sqrt((1 - after) / (1 - now) * (1 - now / after))
    return np.sqrt(now), np.sqrt(1 - now), {"b": np.sqrt(after), "e": np.sqrt(1 - after - std**2), "s": std}


def _dpmsolver(config: SamplerConfig, timesteps: _Ints, power: _Singles) -> _Rule:
    """DPM-Solver++ in x0, its second order from two neighbouring x0 (2M, midpoint)."""
    steps, to_zero = len(timesteps), config.final_sigmas_type == "zero"
    sigmas = np.sqrt((1 - power) / power)
    sigma = np.append(sigmas[timesteps], np.float32(0) if to_zero else sigmas[0])  # (K + 1,)
    signal = 1 / np.sqrt(sigma**2 + 1)
    noise = sigma * signal
    with np.errstate(divide="ignore"):
        h = -np.diff(np.log(sigma.astype(np.float64)))  # stride in log(signal / noise), infinite to sigma = 0
    gain = signal[1:] * -np.expm1(-h)
    past = np.zeros(steps)
    if config.solver_order == 2:
        stop = steps - 1 if to_zero or (config.lower_order_final and steps < 15) else steps
        past[1:stop] = gain[1:stop] * 0.5 * h[1:stop] / h[: stop - 1]
    return signal[:-1], noise[:-1], {"a": noise[1:] / noise[:-1], "b": gain + past, "c": -past}
