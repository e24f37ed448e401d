"""Where the few steps of a sampler lie best for a policy: a small search, judged by the energy distance to its own cloud.

First start, end and spacing, then one step after the other is moved. All candidates get the same noise, so that small
differences show. Whole timesteps only: every policy was trained on those. Knows nothing of files or of how it is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, TypeAlias

from blockcache.errors import FitError, SamplerError
from blockcache.fitting.clouds import Closeness, Clouds, closeness, objective
from blockcache.models.registry import port_of
from blockcache.progress import progress_bar
from blockcache.samplers import ChosenSampler, Diffusion, fewer_steps

Timesteps: TypeAlias = tuple[int, ...]

SAMPLES = 16
"""Chunks for each observation and candidate."""
_STARTS, _ENDS, _POWERS = (0.95, 0.8, 0.7), (0.08, 0.04, 0.0), (0.75, 1.5)


def place_steps(
    policy: Any,
    observations: Any,
    steps: int = 8,
    sampler: str = "ddpm",
    *,
    samples: int = 48,
    seed: int = 0,
    progress: bool = True,
) -> ChosenSampler:
    """Find timesteps for a sampler of few steps, by the energy distance of its actions to those of the policy's own sampler.

    Args:
        policy: The policy object of any family, or its port.
        observations: A batch (N, ...), or a list of batches, from closed-loop states; a quarter is held back as evidence.
        steps: How many.
        sampler: "ddpm", "ddim", "sde-dpmsolver++" or another one of a diffusion, by name.
        samples: Chunks for each observation in the policy's own cloud.
        seed: Of all noise and of what is held back.
        progress: Whether to show bars.

    Returns:
        The sampler. Its evidence has the distance before (the sampler's usual timesteps) and after, both on held-back
        observations, and the number of generations that it took.
    """
    return place(Clouds(port_of(policy), observations, samples=samples, seed=seed, progress=progress), steps, sampler)


def place(clouds: Clouds, steps: int, kind: str) -> ChosenSampler:
    """The same on clouds that are at hand.

    Args:
        clouds: Of the policy.
        steps: How many the sampler has.
        kind: Of sampler, by name.
    """
    started, before = time.perf_counter(), dict(clouds.generations)
    usual = fewer_steps(clouds.own_sampler, kind, steps)
    if not isinstance(usual, Diffusion):
        raise FitError(f"steps are placed for the samplers of a diffusion, such as ddpm; got {kind}")
    reference, noise = clouds.own[clouds.chosen_on], clouds.noise(1)
    few = min(SAMPLES, clouds.samples)

    def score(timesteps: Timesteps) -> float:
        cloud = clouds.other(replace(usual, timesteps=timesteps), clouds.chosen_on, few, noise)
        return float(objective(cloud, reference, spread=1.0))

    found, tried = search(score, tuple(map(int, usual.times())), usual.num_train_timesteps, clouds.progress)
    placed = replace(usual, timesteps=found)

    def judged(config: Diffusion) -> Closeness:
        cloud = clouds.other(config, clouds.held_back, clouds.samples, clouds.noise(2))
        return closeness(cloud, clouds.own[clouds.held_back], spread=1.0)

    evidence = {
        "chosen_by": "place_steps",
        "before": asdict(judged(usual)),
        "after": asdict(judged(placed)),
        "candidates": tried,
        **clouds.evidence(),
        "generations": {name: count - before[name] for name, count in clouds.generations.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
    return ChosenSampler(placed, clouds.fingerprint, evidence)


def search(
    score: Callable[[Timesteps], float], usual: Timesteps, train: int, progress: bool = False
) -> tuple[Timesteps, int]:
    """The timesteps with the lowest score that a small search finds, and how many it looked at.

    Args:
        score: Of falling whole timesteps in 0..train - 1; a SamplerError says that they are too close to one another.
        usual: The ones to beat, as many as are wanted.
        train: Timesteps of the training.
        progress: Whether to show a bar.
    """
    scores: dict[Timesteps, float] = {}
    total = len(_STARTS) * len(_ENDS) + len(_POWERS) + 1 + 2 * len(usual)

    with progress_bar(desc=f"placing {len(usual)} steps", total=total, unit="candidate", disable=not progress) as bar:

        def best(candidates: Iterator[Timesteps]) -> Timesteps:
            for timesteps in candidates:
                bar.update()
                inside = train > timesteps[0] and timesteps[-1] >= 0
                falls = all(early > late for early, late in pairwise(timesteps))
                if inside and falls and timesteps not in scores:
                    try:
                        scores[timesteps] = score(timesteps)
                    except SamplerError:
                        continue
            return min(scores, key=lambda timesteps: scores[timesteps])

        best(iter([usual]))
        ends = {
            spaced(len(usual), start * (train - 1), end * (train - 1)): (start, end)
            for start in _STARTS
            for end in _ENDS
        }
        first = best(iter(ends))
        if first in ends:
            start, end = ends[first]
            first = best(spaced(len(usual), start * (train - 1), end * (train - 1), power) for power in _POWERS)
        for place in range(len(usual)):
            first = best(_moved(first, place, train))
    return first, len(scores)


def spaced(steps: int, start: float, end: float, power: float = 1.0) -> Timesteps:
    """Timesteps that fall from start to end.

    Args:
        steps: How many.
        start: The first.
        end: The last.
        power: 1 spaces them evenly, above 1 closer together at the end.
    """
    last = max(steps - 1, 1)
    return tuple(round(end + (start - end) * (1 - step / last) ** power) for step in range(steps))


def _moved(timesteps: Sequence[int], place: int, train: int) -> Iterator[Timesteps]:
    """One step half way to its neighbours; the first and the last one have the ends of the range beyond them."""
    padded = (train - 1, *timesteps, 0)
    before, here, after = padded[place : place + 3]
    for target in (before, after):
        distance = (target - here) / 2
        if place in (0, len(timesteps) - 1):  # the range beyond may be far away
            distance = max(-train / 16, min(train / 16, distance))
        yield (*timesteps[:place], round(here + distance), *timesteps[place + 1 :])
