"""The denoising loop: on `diffusers` schedulers, the code that users run, or on a sampler's table where they have none.

A caller may hand over all the noise as one tensor (1 + draws, B, T, D); the result is then bit-identical to that of the
generator which would have drawn it. Noise is drawn in the order of the
`diffusers` schedulers: the start of the chunk first, then one tensor for each step that draws (the last DDPM step draws
none), always at full shape (B, T, D). Knows nothing of models or caching.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from blockcache.errors import ObservationError, SamplerError
from blockcache.observations.tensors import as_tensor, check_finite
from blockcache.samplers import DDIM, Diffusion, Guide, SamplerConfig, SamplerTable, SDEDPMSolver, step, table
from blockcache.samplers.diffusers import describe_scheduler, from_diffusers, to_diffusers


@dataclass(frozen=True)
class Sampling:
    """How a policy samples. `Sampling.of(sampler)` where the sampler is one of `samplers`, `Sampling.of_scheduler(...)` of a
    live policy that runs a scheduler of diffusers.

    timesteps: in execution order, as the denoiser is given them.
    settings: what tells two samplers apart, in JSON types.
    sampler: as one of `samplers`; None if it cannot be tabulated, and `unknown` then says what about it is not known.
    """

    timesteps: tuple[float, ...]
    settings: Mapping[str, Any]
    sampler: SamplerConfig | None = None
    unknown: str = ""

    @classmethod
    def of(cls, sampler: SamplerConfig) -> Sampling:
        return cls(tuple(table(sampler).timesteps.tolist()), sampler.to_dict(), sampler)

    @classmethod
    def of_scheduler(cls, scheduler: Any, steps: int, step_arguments: Mapping[str, Any]) -> Sampling:
        """Of a scheduler, the steps that its `set_timesteps` is given, and what its `step` is given besides the sample."""
        known = (scheduler.sampler, "") if isinstance(scheduler, TableScheduler) else None
        sampler, unknown = known or from_diffusers(scheduler, steps, step_arguments)
        own = copy.deepcopy(scheduler)
        own.set_timesteps(steps)
        settings = describe_scheduler(scheduler, steps, step_arguments) if sampler is None else sampler.to_dict()
        return cls(tuple(torch.as_tensor(own.timesteps).tolist()), settings, sampler, unknown)


def scheduler_settings(scheduler: Any) -> list[Any]:
    """What tells two schedulers of a live policy apart, without diffusers' own notes, whose order differs by process."""
    config = getattr(scheduler, "config", {})
    return [type(scheduler), {name: value for name, value in config.items() if not name.startswith("_")}]


def make_scheduler(config: SamplerConfig) -> Any:
    """A fresh scheduler: of `diffusers` if it has one that does the same, else a `TableScheduler`.

    Schedulers hold state while they run, so each generation needs its own.

    Args:
        config: the sampler; its number of steps is what `set_timesteps` is then given.
    """
    scheduler = to_diffusers(config)
    return TableScheduler(config) if scheduler is None else scheduler


def denoise(
    config: SamplerConfig,
    denoiser: Callable[[Tensor, Tensor], Tensor],
    chunk: tuple[int, int, int],
    like: Tensor,
    *,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    constrain: Callable[[Tensor], Tensor] = lambda x: x,
    guide: Guide[Tensor] | None = None,
) -> Tensor:
    """Run all steps and return the clean chunk.

    Args:
        config: the sampler.
        denoiser: takes the sample and the timestep, returns its output.
        chunk: the shape (B, T, D).
        like: gives dtype and device.
        generator: draws the noise, torch's global one without it.
        noise: all of it, (1 + draws, B, T, D), instead of a generator.
        constrain: applied to the sample before every step and at the end (in-painting).
        guide: what the new chunk is told of the one before, which no scheduler of `diffusers` can.
    """
    check_generator(generator)
    if noise is not None:
        noise = check_noise(noise, table(config), chunk, like)
    scheduler = make_scheduler(config) if guide is None else TableScheduler(config, guide)
    scheduler.set_timesteps(config.num_inference_steps)
    drawn = (draw(chunk, like, generator) for _ in itertools.count()) if noise is None else iter(noise)
    x = next(drawn)
    extra: dict[str, Any] = {"eta": config.eta} if isinstance(config, DDIM) else {}
    feed = contextlib.nullcontext() if noise is None else _Feed(drawn)
    for t in scheduler.timesteps:
        x = constrain(x)
        output = denoiser(x, t)
        if isinstance(config, SDEDPMSolver):  # diffusers would draw it in single precision, whatever the sample's
            extra["variance_noise"] = next(drawn)
        with feed:  # around the sampler only: inside it torch's modules would leave their fast paths
            x = scheduler.step(output, t, x, generator=generator, **extra).prev_sample
    return constrain(x)


class TorchArithmetic:
    """The sampler's step on tensors."""

    def mix(self, *terms: tuple[Tensor, float]) -> Tensor:
        (value, coefficient), *others = terms
        total = value if coefficient == 1.0 else value * coefficient
        for value, coefficient in others:
            total = total.add(value, alpha=coefficient)
        return total

    def clip(self, value: Tensor, limit: float) -> Tensor:
        return value.clamp(-limit, limit)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


def mean_step(
    config: SamplerConfig, k: int, x: Tensor, out: Tensor, x0_prev: Tensor | None
) -> tuple[Tensor, Tensor, float]:
    """Step k without its noise: the mean of the next sample, the x0 to hand on, and how much noise is added to the mean.

    Plain arithmetic on tensors, so that it can be differentiated; arguments as those of `samplers.step`.

    Args:
        config: the sampler.
        k: the step, 0 is the first.
        x: the sample, (B, T, D).
        out: the denoiser's output for it.
        x0_prev: the x0 that the step before handed on; None at the first.
    """
    at = table(config).at(k)
    mean, x0 = step(TorchArithmetic(), replace(at, s=0.0), x, out, x0_prev, None)
    return mean, x0, abs(float(at.s))


@dataclass(frozen=True, eq=False)
class Stepped:
    """What a scheduler's step gives back."""

    prev_sample: Tensor
    pred_original_sample: Tensor


class TableScheduler:
    """A sampler's table behind the calls of a `diffusers` scheduler.

    Whole timesteps are int64 as there, others and the times of a flow float32.
    """

    def __init__(self, config: SamplerConfig, guide: Guide[Tensor] | None = None) -> None:
        self.sampler, self._guide = config, guide
        self.config = config.to_dict()
        self._table = table(config)
        whole = isinstance(config, Diffusion) and bool(np.all(self._table.timesteps % 1 == 0))
        self.timesteps = torch.tensor(self._table.timesteps, dtype=torch.int64 if whole else torch.float32)
        self._step = 0
        self._x0: Tensor | None = None

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        """Begin a generation; the number of steps is the sampler's own."""
        if num_inference_steps != self._table.steps:
            raise SamplerError(f"this sampler has {self._table.steps} steps, got {num_inference_steps}")
        self.timesteps = self.timesteps.to(device)
        self._step, self._x0 = 0, None

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *,
        eta: float | None = None,
        generator: torch.Generator | None = None,
        variance_noise: Tensor | None = None,
    ) -> Stepped:
        """The next step, in order. `eta` is in the table already; `variance_noise` takes the place of a draw."""
        k = self._step
        expected = float(self.timesteps[k]) if k < self._table.steps else None
        if float(timestep) != expected:
            raise SamplerError(
                f"step {k}: expected timestep {expected}; got {float(timestep)}; begin with set_timesteps"
            )
        noise = variance_noise
        if noise is None and self._table.draws[k]:
            noise = draw(tuple(sample.shape), sample, generator)
        x, self._x0 = step(TorchArithmetic(), self._table.at(k), sample, model_output, self._x0, noise, self._guide)
        self._step += 1
        return Stepped(x, self._x0)


class _Feed(TorchFunctionMode):
    """While active, `torch.randn` hands out prepared noise: diffusers' DDPM takes no noise argument."""

    def __init__(self, noise: Iterator[Tensor]) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            return next(self._noise)
        return func(*args, **(kwargs or {}))


# -- the noise of one generation: how much there is, in which order it is drawn, and how a seed decides it


def noise_shape(sampler: SamplerTable, chunk: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """All the noise of a generation of a chunk (B, T, D): the start, then one for each step that draws."""
    return (1 + sampler.draw_count, *chunk)


def draw(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """One tensor, with the dtype and device of `like`; a generator on another device draws there.

    Args:
        shape: of the tensor.
        like: gives dtype and device.
        generator: draws; torch's global one without it.
    """
    check_generator(generator)
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


def draw_all(
    sampler: SamplerTable,
    chunk: tuple[int, int, int],
    like: Tensor,
    generator: torch.Generator | None,
    start: Tensor | None = None,
) -> Tensor:
    """(1 + draws, B, T, D), tensor by tensor as a scheduler would draw them; `start` is the first where that was drawn.

    Args:
        sampler: the table of the sampler, which says how many steps draw.
        chunk: the shape of a sample, (B, T, D).
        like: gives dtype and device.
        generator: draws; torch's global one without it.
        start: the first tensor, (B, T, D), where that was drawn already.
    """
    count, *shape = noise_shape(sampler, chunk)
    drawn = [] if start is None else [start.to(like)]
    return torch.stack([*drawn, *(draw(tuple(shape), like, generator) for _ in range(count - len(drawn)))])


def check_generator(generator: Any) -> None:
    """Refuse what torch cannot draw from."""
    if not isinstance(generator, torch.Generator | None):
        raise ObservationError(
            f"noise is drawn from a torch.Generator, got {type(generator).__name__}; torch.Generator().manual_seed(0) makes "
            "a generator that always draws the same"
        )


def check_noise(noise: Any, sampler: SamplerTable, chunk: tuple[int, int, int], like: Tensor) -> Tensor:
    """Noise that a caller hands over, as (1 + draws, B, T, D).

    Args:
        noise: what the caller gave.
        sampler: the table of the sampler, which says how many steps draw.
        chunk: the shape of a sample, (B, T, D).
        like: gives the dtype and device that it is put on.
    """
    given, expected = as_tensor(noise, "noise"), noise_shape(sampler, chunk)
    if tuple(given.shape) != expected:
        raise ObservationError(
            f"noise has shape {tuple(given.shape)}, expected {expected}: the start and one tensor for each step that "
            "draws; policy.draw_noise makes it"
        )
    given = given.to(like)
    check_finite(given, "noise")
    return given


def generate(predict_action: Callable[..., Any], obs: Any, seed: int) -> Any:
    """Call a policy's `predict_action` with noise that depends on `seed` alone.

    A policy that takes no `generator` draws from torch's global one, which is seeded and put back afterwards.

    Args:
        predict_action: the policy's method, or what stands in its place.
        obs: one batch of observations.
        seed: of the generator; the same seed gives the same noise.
    """
    if takes_generator(predict_action):
        return predict_action(obs, generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return predict_action(obs)


def takes_generator(predict_action: Callable[..., Any]) -> bool:
    """Whether a policy draws its noise from a generator that it is given.

    Args:
        predict_action: the policy's method, or what stands in its place.
    """
    return "generator" in inspect.signature(predict_action).parameters
