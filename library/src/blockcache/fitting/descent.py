"""Fit the constants of a sampler of few steps to one policy, through the generation. No weight of the policy is touched.

Adam on `2 E|X - Y| - w E|X - X'|` between the few-step cloud X and the policy's own cloud Y.
Knows nothing of files or tasks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.engines.accelerate import check_fit
from blockcache.errors import FitError
from blockcache.fitting.clouds import Closeness, Clouds, closeness, objective
from blockcache.fitting.denoising import COLUMNS, FewSteps, check_same, constants_of
from blockcache.fitting.placement import place
from blockcache.models.registry import port_of
from blockcache.models.sampling import draw
from blockcache.observations import pick
from blockcache.progress import progress_bar
from blockcache.samplers import ChosenSampler, Diffusion, Fitted, SamplerConfig
from blockcache.schedule import Plan, Schedule, compile_plan

TOGETHER = 48
"""Chunks that are differentiated at once; the rest of an iteration follows, so that memory does not grow with it."""


@dataclass(frozen=True)
class Effort:
    """How much work a fit is. The defaults take two to three minutes on two cores for 8 layers of width 128.

    Args:
        iterations: Of Adam; the constants of every tenth part are judged on the held-back observations.
        observations: In one iteration, drawn anew for each.
        samples: Chunks for each of them.
        rate: Adam's first step, in shares of a constant; it falls to 0 along a cosine.
        starts: So many fits: the first begins at the start, the others at its timesteps moved at random. The best one on the
            held-back observations is kept.
    """

    iterations: int = 100
    observations: int = 6
    samples: int = 24
    rate: float = 0.02
    starts: int = 1

    def __post_init__(self) -> None:
        least = {"iterations": 1, "observations": 1, "samples": 2, "starts": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise FitError(f"a fit needs {name} of at least {low}, got {getattr(self, name)}")
        if not 0 < self.rate <= 1:
            raise FitError(f"a fit needs a rate above 0 and up to 1, got {self.rate}")


def fit_sampler(
    policy: Any,
    observations: Any,
    steps: int = 5,
    spread: float = 0.7,
    *,
    start: SamplerConfig | None = None,
    schedule: Schedule | None = None,
    effort: Effort | None = None,
    samples: int = 48,
    seed: int = 0,
    progress: bool = True,
) -> ChosenSampler:
    """Fit all constants of a sampler of few steps, so that its actions are distributed like those of the policy's own.

    Args:
        policy: The policy object of any family, or its port, with a denoiser that can be differentiated.
        observations: A batch (N, ...), or a list of batches, from closed-loop states; a quarter is held back: the constants
            that do best on it are kept.
        steps: How many.
        spread: w in 2 E|X - Y| - w E|X - X'|: 1 keeps the spread of the actions, less makes them sharper.
        start: Where to start from, such as placed DDPM steps; without it DDPM steps are placed first.
        schedule: Which blocks are computed at which of the steps: the generation is fitted through with what is reused.
        effort: How much work, see `Effort`.
        samples: Chunks for each observation in the policy's own cloud.
        seed: Of all noise and of what is held back; the same seed gives the same constants.
        progress: Whether to show bars.

    Returns:
        The sampler, with its evidence.

    Raises:
        FitError: The fit did not beat its start on the held-back observations; the start is what to use then.
    """
    clouds = Clouds(port_of(policy), observations, samples=samples, seed=seed, progress=progress)
    return fit(clouds, steps, spread, start, effort or Effort(), schedule)


def fit(
    clouds: Clouds,
    steps: int,
    spread: float,
    start: SamplerConfig | None = None,
    effort: Effort | None = None,
    schedule: Schedule | None = None,
) -> ChosenSampler:
    """What `fit_sampler` does, on clouds that are at hand.

    Args:
        clouds: The policy, its observations and its own chunks at them.
        steps: How many.
        spread: Up to 1, which keeps the spread of the actions; less makes them sharper.
        start: A sampler of as many steps to start from; without it DDPM steps are placed first.
        effort: How much work, see `Effort`.
        schedule: Which blocks are computed at which of the steps; without it all are.
    """
    if not 0 < spread <= 1:
        raise FitError(f"spread is above 0 and up to 1, got {spread}")
    if start is not None and start.num_inference_steps != steps:
        raise FitError(f"a fit of {steps} steps starts from a sampler of as many, got {start.num_inference_steps}")
    started, effort, counted = time.perf_counter(), effort or Effort(), dict(clouds.generations)
    chosen = ChosenSampler(start) if start is not None else place(clouds, steps, "ddpm")
    if schedule is not None:
        check_fit(schedule.fingerprint, clouds.port.with_sampler(chosen.sampler), "strict")
    plan = None if schedule is None else compile_plan(schedule)
    starts = starts_of(chosen.sampler, effort.starts, clouds)
    fits = [_Fit(clouds, Fitted.of(one), spread, effort, plan) for one in starts]
    ends = [(run, *run.best()) for run in fits]
    run, found, kept, _ = min(ends, key=lambda end: end[3])
    begun, before, after = fits[0].begun, fits[0].judged(fits[0].start, 1), run.judged(found, 1)
    if not after.objective < before.objective:
        raise FitError(
            f"the fit of {steps} steps did not beat its start on {len(clouds.held_back)} held-back observations (objective "
            f"{after.objective:.4f} against {before.objective:.4f}); give more observations, or use {chosen.sampler.type} "
            f"with timesteps {list(begun.timesteps or ())}"
        )
    evidence = {
        "chosen_by": "fit_sampler",
        "spread": spread,
        "before": asdict(before),
        "after": asdict(after),
        "start": chosen.sampler.to_dict(),
        **({} if schedule is None else {"schedule": schedule.describe()}),
        **({} if effort.starts == 1 else {"objectives": [lowest for *_, lowest in ends]}),
        "kept_iteration": kept,
        "effort": asdict(effort),
        "times": "fitted" if run.times_free else "fixed: the denoiser cannot be differentiated by its time",
        **clouds.evidence(),
        "generations": {name: count - counted[name] for name, count in clouds.generations.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
    return ChosenSampler(run.sampler(found), clouds.fingerprint, evidence)


def starts_of(first: SamplerConfig, count: int, clouds: Clouds) -> list[SamplerConfig]:
    """The first, and others that are like it at timesteps moved at random, each at most half way to its neighbours."""
    if count == 1:
        return [first]
    if not isinstance(first, Diffusion) or first.needs_fitting:
        raise FitError(f"several starts move the timesteps of a sampler such as ddpm, got {first.type}; take one start")
    draws = np.random.default_rng(clouds.noise(7))
    ends = np.array([first.num_train_timesteps - 1, *first.times(), 0], dtype=float)
    low, high = (ends[1:-1] + ends[2:]) / 2, (ends[1:-1] + ends[:-2]) / 2
    least = np.ceil(low)  # so that no two steps meet
    moved = [
        np.floor(draws.uniform(low, high)).clip(least, np.maximum(least, np.ceil(high) - 1)) for _ in range(count - 1)
    ]
    return [first, *(replace(first, timesteps=tuple(times.astype(int).tolist())) for times in moved)]


class _Fit:
    """One fit. Its variables are `(constants - start) / scale`, so that one rate serves timesteps and weights alike."""

    def __init__(self, clouds: Clouds, begun: Fitted, spread: float, effort: Effort, plan: Plan | None = None) -> None:
        self.clouds, self.begun, self.spread, self.effort, self.plan = clouds, begun, spread, effort, plan
        self.port, self.clip, self.start = clouds.port.with_sampler(begun), begun.clip, constants_of(begun)
        self.port.module.requires_grad_(False)
        self.port.adapter.denoiser.requires_grad_(False)
        probed = self._batch(clouds.chosen_on[:1], 2)
        self.times_free = self._is_differentiable(probed, whole_times=False)
        if not self.times_free and not self._is_differentiable(probed, whole_times=True):
            raise FitError(
                f"the denoiser {type(self.port.adapter.denoiser).__name__} gives no gradient; a sampler can be placed "
                "for it (place_steps), not fitted"
            )
        check_same(self.port, begun, probed, clouds.noise(3), not self.times_free)
        self.scale = self.start.abs().clamp(min=0.25)
        self.scale[:, 0] = begun.num_train_timesteps / 4
        self.free = torch.ones_like(self.start)
        self.free[0, COLUMNS.index("c")] = self.free[-1, COLUMNS.index("s")] = 0.0
        self.free[:, 0] = float(self.times_free)

    def best(self) -> tuple[Tensor, int, float]:
        """The constants that do best on the held-back observations, after how many iterations they were there, and their
        objective."""
        effort, change = self.effort, torch.zeros_like(self.start, requires_grad=True)
        adam = torch.optim.Adam([change], lr=effort.rate)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, effort.iterations)
        order = torch.Generator().manual_seed(self.clouds.noise(4))
        best, kept, lowest = self.start, 0, self.judged(self.start, 0).objective
        every = max(1, effort.iterations // 10)
        title, hidden = f"fitting {len(self.start)} steps", not self.clouds.progress
        with progress_bar(range(1, effort.iterations + 1), title, unit="iteration", disable=hidden) as bar:
            bar.set_postfix(held_back=f"{lowest:.4f}")
            for number in bar:
                picked = torch.randperm(len(self.clouds.chosen_on), generator=order)[: effort.observations].tolist()
                change.grad = self._gradient(change, [self.clouds.chosen_on[place] for place in picked], number)
                adam.step()
                rate.step()
                with torch.no_grad():
                    change.copy_((self._in_order(self._constants(change)) - self.start) / self.scale)
                    if number % every == 0:
                        constants = self._constants(change)
                        reached = self.judged(constants, 0).objective
                        if reached < lowest:
                            best, kept, lowest = constants, number, reached
                        bar.set_postfix(held_back=f"{lowest:.4f}")
        return best, kept, lowest

    def judged(self, constants: Tensor, draw: int) -> Closeness:
        """On the held-back observations; equal `draw`, equal noise."""
        clouds, samples, found = self.clouds, self.clouds.samples, []
        with torch.no_grad():
            for place in clouds.held_back:
                few = self._few(self._batch([place], samples))
                found.append(few.run(constants, self.clip, self._noise(few, clouds.noise(5, draw, place))))
        clouds.generations["other"] += len(found) * samples
        return closeness(torch.stack(found).cpu(), clouds.own[clouds.held_back], self.spread)

    def sampler(self, constants: Tensor) -> Fitted:
        columns = {name: tuple(constants[:, index].tolist()) for index, name in enumerate(COLUMNS)}
        return replace(self.begun, **columns)  # type: ignore[arg-type]

    def _gradient(self, change: Tensor, places: Sequence[int], number: int) -> Tensor:
        """Of one iteration's objective, a few observations at a time."""
        clouds, samples = self.clouds, self.effort.samples
        each, total = max(1, TOGETHER // samples), torch.zeros_like(change)
        for first in range(0, len(places), each):
            part = places[first : first + each]
            few = self._few(self._batch(part, samples))
            noise = self._noise(few, clouds.noise(6, number, first))
            cloud = few.run(self._constants(change), self.clip, noise).reshape(len(part), samples, -1)
            loss = objective(cloud, clouds.own[part].to(cloud), self.spread) * (len(part) / len(places))
            (gradient,) = torch.autograd.grad(loss, [change])
            total += gradient
        clouds.generations["other"] += len(places) * samples
        if not bool(total.isfinite().all()):
            step, column = (int(index) for index in (~total.isfinite()).nonzero()[0])
            raise FitError(
                f"iteration {number} of the fit gave no finite gradient for {COLUMNS[column]} of step {step}; start from "
                "other steps, or fit at a lower rate"
            )
        return total

    def _constants(self, change: Tensor) -> Tensor:
        return self.start + change * self.scale * self.free

    def _few(self, batch: Any) -> FewSteps:
        return FewSteps(self.port, batch, not self.times_free, self.plan)

    def _is_differentiable(self, batch: Any, whole_times: bool) -> bool:
        few = FewSteps(self.port, batch, whole_times)
        return few.is_differentiable(float(self.start[0, 0]), self._noise(few, self.clouds.noise(3)))

    def _in_order(self, constants: Tensor) -> Tensor:
        """With timesteps that stay in their range and fall, a thousandth of it apart."""
        train, times, constants = self.begun.num_train_timesteps, constants[:, 0].tolist(), constants.clone()
        if not self.times_free:
            return constants
        gap, last = train / 1000, len(times) - 1
        for step in range(len(times)):
            above = train - 1.0 if step == 0 else times[step - 1] - gap
            times[step] = max(gap * (last - step), min(above, times[step]))
        constants[:, 0] = torch.tensor(times, dtype=constants.dtype)
        return constants

    def _batch(self, places: Sequence[int], samples: int) -> Any:
        return pick(self.clouds.observations, [place for place in places for _ in range(samples)])

    def _noise(self, few: FewSteps, seed: int) -> Tensor:
        """(K, B, T, D)"""
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([draw(tuple(few.like.shape), few.like, generator) for _ in range(len(self.start))])
