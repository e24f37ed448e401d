"""A generation of few steps that can be differentiated by the sampler's constants.

A policy's entry draws and steps without gradients, so its denoiser is called here instead: with the conditions that the
policy itself hands to it, and the package's one step between the calls. That this is the same generation is checked, not
assumed. Works for every port whose denoiser is differentiable. Knows nothing of what is fitted or how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from blockcache.attach.generation import Generation, attach, first_denoiser_call
from blockcache.attach.patching import Patches
from blockcache.engines.handle import Counts
from blockcache.engines.patched import ScheduledGeneration
from blockcache.errors import FitError
from blockcache.fitting.clouds import executed
from blockcache.models.port import Port
from blockcache.models.sampling import TorchArithmetic, draw_all, generate, takes_generator
from blockcache.samplers import Coefficients, Fitted, step, table
from blockcache.samplers.fitted import WEIGHTS
from blockcache.schedule import Plan

COLUMNS = ("timesteps", *WEIGHTS)
"""What a step is made of, in the order of the constants (K, 7)."""
TOLERANCE = 1e-3
"""Of normalised actions: two ways to do the same sums differ by 1e-5, another generation by far more."""


class Differentiable(TorchArithmetic):
    """The sampler's step, where a coefficient may be a tensor that wants its gradient."""

    def mix(self, *terms: tuple[Tensor, Any]) -> Tensor:
        total: Tensor = sum(value * coefficient for value, coefficient in terms)
        return total


class FewSteps:
    """Generations at given observations, one for each sample of the batch.

    Args:
        port: A copy of the policy, whose weights want no gradient.
        batch: The observations, as a file or a rollout has them.
        whole_times: Whether the denoiser is given timesteps as whole numbers, which nothing can be differentiated by.
        plan: Which blocks are computed at which step; all of them without it.
    """

    def __init__(self, port: Port, batch: Any, whole_times: bool = False, plan: Plan | None = None) -> None:
        self._port, self._whole, self._plan = port, whole_times, plan
        self._denoiser, self.like = _denoiser(port, batch)

    def run(self, constants: Tensor, clip: float | None, noise: Tensor) -> Tensor:
        """The executed actions (B, features), normalised.

        Args:
            constants: (K, 7), see `COLUMNS`.
            clip: Of x0.
            noise: (K, B, T, D): the start, then what each step but the last adds.
        """
        last, x, x0 = len(constants) - 1, noise[0], None
        with self._reusing() as at_step:
            for number, row in enumerate(constants.to(x.dtype)):
                at: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
                time = at.pop("timesteps")
                with at_step(number):
                    output = self._denoiser(x, time.round().long() if self._whole else time)
                if x0 is None:
                    del at["c"]
                if number == last:
                    del at["s"]
                added = None if number == last else noise[number + 1]
                x, x0 = step(Differentiable(), Coefficients(clip=clip, **at), x, output, x0, added)
        first, end = self._port.executed
        return x[:, first:end, : len(self._port.action_scale)].flatten(1).double()

    @contextmanager
    def _reusing(self) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
        """For each step of one generation, what its call of the denoiser is made in."""
        if self._plan is None:
            yield nullcontext
            return
        generation = ScheduledGeneration(self._plan, Counts())
        with attach(self._port, Generation) as attached:
            yield lambda step: attached.at(step, generation, free=True)

    def is_differentiable(self, timestep: float, noise: Tensor) -> bool:
        """Whether the denoiser's output has a gradient by its sample and, unless times are whole, by its time as well."""
        sample = noise[0].clone().requires_grad_()
        time = torch.tensor(timestep, dtype=torch.int64 if self._whole else noise.dtype, device=noise.device)
        inputs = [sample] if self._whole else [sample, time.requires_grad_()]
        try:
            output = self._denoiser(sample, time)
            found = torch.autograd.grad(output.square().sum(), inputs, allow_unused=True)
        except Exception:  # no graph, or an embedding that takes whole timesteps only; foreign code may raise anything
            return False
        return all(gradient is not None and bool((gradient != 0).any()) for gradient in found)


def constants_of(sampler: Fitted) -> Tensor:
    """(K, 7)"""
    columns = [table(sampler).timesteps, *(getattr(sampler, name) for name in WEIGHTS)]
    return torch.stack([torch.tensor(column, dtype=torch.float64) for column in columns], dim=1)


def check_same(port: Port, sampler: Fitted, batch: Any, seed: int, whole_times: bool) -> None:
    """Refuse a policy that does something of its own around its denoiser: what would be fitted is another generation."""
    other = port.with_sampler(sampler)
    entry = getattr(other.policy, other.entry)
    expected = executed(other, other.action_of(generate(entry, other.prepare_observation(batch), seed)))
    few = FewSteps(port, batch, whole_times)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        chunk = (len(expected), port.horizon, port.sample_dim)
        generator = torch.Generator().manual_seed(seed) if takes_generator(entry) else None
        noise = draw_all(table(sampler), chunk, few.like, generator)
        found = few.run(constants_of(sampler), sampler.clip, noise)
    apart = float((found.cpu() - expected).abs().max()) if found.shape == expected.shape else torch.inf
    if not apart <= TOLERANCE:
        raise FitError(
            f"{type(port.policy).__name__}.{port.entry} does more around its denoiser than the sampler's steps (its actions "
            f"are {apart:.2g} away from theirs), so a sampler can be placed for it (place_steps), not fitted"
        )


def _denoiser(port: Port, batch: Any) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """The denoiser with the conditions of a batch of observations: (sample, timestep) -> output; and a sample to be like."""

    denoiser, entry, patches = port.adapter.denoiser, getattr(port.policy, port.entry), Patches()
    first_call = first_denoiser_call(port, lambda obs: generate(entry, obs, seed=0), patches)
    with patches:
        arguments = first_call(port.prepare_observation(batch))
    if arguments is None:
        raise FitError(
            f"{type(port.policy).__name__}.{port.entry} made no use of its denoiser; there is nothing to fit"
        )
    args, kwargs = arguments
    chunk = (port.horizon, port.sample_dim)
    timestep = port.adapter.timestep(*args, **kwargs)
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    place = next(
        (key for key, value in named.items() if isinstance(value, Tensor) and tuple(value.shape[1:]) == chunk), None
    )
    when = next((key for key, value in named.items() if value is timestep), None)
    if place is None or when is None:
        raise FitError(
            f"the denoiser {type(denoiser).__name__} was not given a sample of {chunk} and a timestep as arguments of their "
            "own; a sampler can be placed for it (place_steps), not fitted"
        )
    fixed = {key: _plain(value) for key, value in named.items()}

    def output(sample: Tensor, time: Tensor) -> Tensor:
        if isinstance(timestep, Tensor):
            time = time.to(timestep.device).expand(timestep.shape)
        filled = {**fixed, place: sample, when: time}
        found: Tensor = denoiser(*(filled[index] for index in range(len(args))), **{key: filled[key] for key in kwargs})
        return found

    return output, torch.empty_like(named[place], requires_grad=False)


def _plain(value: Any) -> Any:
    """Out of a policy's inference mode, where tensors know no gradients."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
