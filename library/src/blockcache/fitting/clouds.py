"""Clouds of actions: many chunks for each observation, drawn by a policy's own sampler or by another one in its place.

A cloud is (observations, samples, features): the executed slice, normalised and flattened. Every generation is one of the
policy itself, so this works for whatever has a port. How far one lies from another is said here so that it can be
differentiated; `measure.distance` says it of finished clouds, with intervals. Knows nothing of how a sampler is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.engines import accelerate
from blockcache.errors import FitError
from blockcache.measure.action_error import Act
from blockcache.models.port import Port
from blockcache.models.sampling import generate
from blockcache.observations import batch_size, hash_observations, parts, pick
from blockcache.observations.tensors import as_one_batch
from blockcache.progress import progress_bar
from blockcache.samplers import SamplerConfig

TOGETHER = 192
"""Chunks in one call of the policy."""
BATCH = 32
"""Observations in one call of whatever draws the clouds of a check."""
LEAST = 4
"""Observations: one of them is held back."""


class Clouds:
    """The observations that a sampler is chosen on, split in two, and the policy's own cloud at them.

    Args:
        port: The policy; a copy of it is used.
        observations: A batch, or a list of batches; a quarter is held back: nothing is chosen on it, it is for the
            evidence.
        samples: Chunks for each observation in the policy's own cloud.
        seed: Of the split and of all noise.
        progress: Whether to show bars.
    """

    def __init__(
        self, port: Port, observations: Any, *, samples: int = 48, seed: int = 0, progress: bool = True
    ) -> None:
        if port.sampler is None:
            raise FitError(
                f"{port.sampling.unknown} cannot be exchanged for another sampler: it is not one that blockcache knows"
            )
        self.observations = as_one_batch(observations)
        count = batch_size(self.observations)
        if count < LEAST:
            raise FitError(
                f"choosing a sampler needs at least {LEAST} observations (better 30), as a quarter is held back; got {count}"
                ", record more with blockcache policy observe"
            )
        self.fingerprint = port.fingerprint  # before the port is copied, so that the weights are hashed once
        self.port, self.own_sampler = port.copy(), port.sampler
        self.samples, self.seed, self.progress = samples, seed, progress
        order = np.random.default_rng(seed).permutation(count).tolist()
        self.held_back, self.chosen_on = sorted(order[: count // 4]), sorted(order[count // 4 :])
        self.generations = {"own": 0, "other": 0}

    @cached_property
    def own(self) -> Tensor:
        """The policy's own cloud at all observations, at full precision."""
        everywhere = range(batch_size(self.observations))
        with accelerate(self.port, None, threads=torch.get_num_threads()):
            cloud = self._draw(self.port, everywhere, self.samples, self.noise(0), "own cloud")
        self.generations["own"] += len(cloud) * self.samples
        return cloud

    def other(self, sampler: SamplerConfig, places: Sequence[int], samples: int, noise: int) -> Tensor:
        """The cloud of another sampler at some of the observations; equal `noise` gives equal noise."""
        cloud = self._draw(self.port.with_sampler(sampler), places, samples, noise)
        self.generations["other"] += len(places) * samples
        return cloud

    def noise(self, *key: int) -> int:
        """A seed that depends on this choice's seed and a key alone."""
        return seed_of(self.seed, *key)

    def evidence(self) -> dict[str, Any]:
        """What was looked at."""
        return {
            "seed": self.seed,
            "observations": hash_observations(self.observations),
            "chosen_on": len(self.chosen_on),
            "held_back": len(self.held_back),
            "samples": self.samples,
        }

    def _draw(self, port: Port, places: Sequence[int], samples: int, noise: int, shown: str | None = None) -> Tensor:
        entry: Callable[..., Any] = getattr(port.policy, port.entry)
        each = max(1, TOGETHER // samples)
        calls = [places[start : start + each] for start in range(0, len(places), each)]
        found, bar = [], progress_bar(calls, shown, unit="call", disable=shown is None or not self.progress)
        for number, part in enumerate(bar):
            batch = pick(self.observations, [place for place in part for _ in range(samples)])
            returned = generate(entry, port.prepare_observation(batch), self.noise(noise, number))
            found.append(executed(port, port.action_of(returned)).reshape(len(part), samples, -1))
        return torch.cat(found)


def executed(port: Port, action: Tensor) -> Tensor:
    """Executed actions as one row for each, (B, features), normalised.

    Args:
        port: Says the units.
        action: (B, n_action_steps, A) in robot units.
    """
    scale, offset = (torch.as_tensor(value) for value in (port.action_scale, port.action_offset))
    return (action.detach().cpu().double() * scale + offset).flatten(1)


def draw_chunks(
    act: Act,
    observations: Any,
    samples: int,
    scale: NDArray[np.float64],
    seed: int,
    *,
    batch: int = BATCH,
    progress: str | None = None,
) -> NDArray[np.float64]:
    """Executed chunks in normalised units, (observations, samples, n_action, A).

    Each sample is a pass over all observations, so that the first few samples are those that a smaller number gives.
    Another seed gives independent noise; the same seed, observations and batch give two methods the same noise.

    Args:
        act: Such as `Running.act`: (a batch of observations, seed) -> executed actions in robot units.
        observations: A batch.
        samples: Chunks for each observation.
        scale: (A,) the port's `action_scale`.
        seed: Of the noise.
        batch: Observations in one call.
        progress: What a bar says, if there is to be one.
    """
    batches = parts(observations, batch)
    bar = progress_bar(
        total=samples * batch_size(observations), desc=progress, unit="chunk", disable=progress is None, leave=False
    )
    drawn = []
    with bar:
        for sample in range(samples):
            chunks = []
            for place, part in enumerate(batches):
                chunks.append(act(part, seed_of(seed, sample, place)) * scale)
                bar.update(len(chunks[-1]))
            drawn.append(np.concatenate(chunks))
    return np.stack(drawn, axis=1)


def seed_of(*numbers: int) -> int:
    """One seed for noise from several numbers. They are mixed, not added: seeds that are neighbours must not share noise.

    Args:
        *numbers: Such as the seed of all noise, and which sample at which place it is for.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@dataclass(frozen=True)
class Closeness:
    """Of a cloud to the policy's own, over all observations.

    Args:
        objective: What is minimised: 2 E|X - Y| - w E|X - X'| - E|Y - Y'|, over E|Y - Y'|; w = 1 is the energy distance.
        energy: The energy distance, over E|Y - Y'|.
        centre_shift: Root of the mean squared distance between the means, unbiased: what the means scatter by is taken
            off, and 0 where that leaves nothing.
        spread: E|X - X'| over E|Y - Y'|.
    """

    objective: float
    energy: float
    centre_shift: float
    spread: float


def objective(found: Tensor, reference: Tensor, spread: float) -> Tensor:
    """2 E|X - Y| - w E|X - X'|, the mean over observations; the term that no sampler changes is left out.

    Args:
        found: (observations, samples, features), X.
        reference: The same of the policy's own sampler, Y.
        spread: w: 1 keeps the spread of the policy's own cloud, less gives a sharper one.
    """
    return 2 * _between(found, reference).mean() - spread * _inside(found).mean()


def closeness(found: Tensor, reference: Tensor, spread: float) -> Closeness:
    """All that is reported of a cloud.

    Args:
        found: (observations, samples, features).
        reference: The same of the policy's own sampler.
        spread: w in the objective.
    """
    apart, own, others = _between(found, reference).mean(), _inside(reference).mean(), _inside(found).mean()
    scatter = sum(cloud.var(dim=1).sum(dim=-1) / cloud.shape[1] for cloud in (found, reference))
    shift = ((found.mean(dim=1) - reference.mean(dim=1)) ** 2).sum(dim=-1) - scatter
    return Closeness(
        objective=float((2 * apart - spread * others - own) / own),
        energy=float((2 * apart - others - own) / own),
        centre_shift=float(shift.mean().clamp(min=0).sqrt()),
        spread=float(others / own),
    )


def _between(found: Tensor, reference: Tensor) -> Tensor:
    """Mean distance of a sample of the one to a sample of the other, for each observation."""
    # the quicker way through a matrix product is off by the root of the precision where two samples are near
    return torch.cdist(found, reference, compute_mode="donot_use_mm_for_euclid_dist").mean(dim=(1, 2))


def _inside(cloud: Tensor) -> Tensor:
    """Mean distance of two samples of a cloud, for each observation; none is paired with itself."""
    return torch.stack([torch.pdist(one).mean() for one in cloud])
