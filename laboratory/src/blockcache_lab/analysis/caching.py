"""What reuse does inside a policy: caching errors, how they spread from FFN to FFN, features, and the actions' errors.

The caching error is `|b^ - b| / |b|` (L2) for every block and step, `b` from a full run with the same noise. At an update
step the error comes from upstream (update-induced), elsewhere from reuse as well (reuse-induced).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.attach.generation import Generation, LayerCall
from blockcache.block import FEED_FORWARD
from blockcache.engines.accelerate import accelerate, check_fit
from blockcache.errors import ObservationError
from blockcache.measure.action_error import action_error, actions
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.models.sampling import generate
from blockcache.observations import rows
from blockcache.progress import progress_bar
from blockcache.schedule import Schedule
from blockcache_lab.analysis.residuals import every_step, relative, residuals, run, update_marks
from blockcache_lab.analysis.section import AnalysisError, Array
from blockcache_lab.analysis.sections import Caching, Correlation, FeatureMaps, WeakerPolicy

BETAS = tuple(float(beta) for beta in np.linspace(0, 2, 9))
OTHER_NOISE = 10_000
"""Added to the seed for a second full run: what it differs by from the first is the noise floor."""


def caching_errors(
    policy: Any,
    schedules: Mapping[str, Schedule],
    observations: Sequence[Any],
    seed: int = 0,
    progress: str | None = None,
) -> Caching:
    """Run each batch of observations in full and by every schedule, and compare what each block added.

    Args:
        policy: A policy object of any known family, or its port.
        schedules: By the names that the result knows them by.
        observations: Batches as the policy takes them; all samples count alike.
        seed: The noise depends on it and the batch's place alone.
        progress: The words before a progress bar; None shows none.
    """
    if not schedules:
        raise AnalysisError("a caching error is that of a schedule, and there is none")
    errors = _errors(port_of(policy), list(schedules.values()), observations, seed, progress)
    updates = np.array([update_marks(schedule) for schedule in schedules.values()])
    return Caching(tuple(schedules), errors, updates)


def caching_error(
    policy: Any, schedule: Schedule, observations: Sequence[Any], seed: int = 0, progress: str | None = None
) -> NDArray[np.float64]:
    """(blocks, K): the same for one schedule, in double precision."""
    errors: NDArray[np.float64] = _errors(port_of(policy), [schedule], observations, seed, progress)[0]
    return errors


def _errors(
    port: Port, schedules: Sequence[Schedule], observations: Sequence[Any], seed: int, progress: str | None
) -> NDArray[np.float64]:
    """(schedules, blocks, K), means over samples."""
    for schedule in schedules:
        check_fit(schedule.fingerprint, port)
    full = every_step(port)
    total, samples = np.zeros((len(schedules), len(full.blocks), full.steps)), 0
    batches = progress_bar(observations, progress, unit="batch", disable=progress is None, delay=1.0, leave=False)
    for index, batch in enumerate(batches):
        true = residuals(port, full, batch, seed + index)
        for place, schedule in enumerate(schedules):
            used = residuals(port, schedule, batch, seed + index)
            for row, name in enumerate(full.blocks):
                total[place, row] += relative(used[name], true[name]).sum(dim=1).cpu().numpy()
        samples += true[full.blocks[0]].shape[1]
    if not samples:
        raise ObservationError("a caching error needs at least one batch of observations, got none")
    return total / samples


def ffns_of(port: Port) -> list[str]:
    """The names of the FFN blocks, in execution order.

    Args:
        port: The policy.
    """
    return [block.name for block in port.adapter.blocks if block.kind == FEED_FORWARD]


def error_correlation(
    port: Port,
    observations: Sequence[Any],
    seed: int = 0,
    *,
    upstream: str | None = None,
    step: int | None = None,
    betas: Sequence[float] = BETAS,
    progress: str | None = None,
) -> Correlation:
    """How an upstream FFN's error arrives in the last FFN, which is computed in full: over the steps, and scaled at one.

    The upstream block reuses its first output at all steps, everything else is computed.

    Args:
        port: The policy.
        observations: Batches; the first of them serves for the betas.
        seed: Of the noise.
        upstream: A block; the last FFN but one unless named.
        step: Where the error is scaled; the middle one unless given.
        betas: What the error is scaled by: 0 is the true output, 1 the one that is reused.
        progress: The words before a progress bar; None shows none.
    """
    ffns, full = ffns_of(port), every_step(port)
    if len(ffns) < 2:
        raise AnalysisError(f"The policy has {len(ffns)} FFN, and errors correlate between two of them.")
    if full.steps < 2:
        raise AnalysisError("The policy has 1 step, so that nothing is ever reused.")
    upstream, downstream = upstream or ffns[-2], ffns[-1]
    if upstream not in full.blocks:
        raise AnalysisError(f"no block {upstream!r}, the policy's are {full.blocks[0]} to {full.blocks[-1]}")
    reused = Schedule(full.steps, {**full.updates, upstream: (0,)})
    errors = caching_error(port, reused, observations, seed, progress)  # (blocks, K)
    step = full.steps // 2 if step is None else step
    if not 0 < step < full.steps:
        raise AnalysisError(f"the step must be from 1 to {full.steps - 1}, got {step}; at step 0 nothing is reused")
    scaled = [_Scaled(upstream, downstream, step, beta) for beta in (0.0, *betas)]
    for generation in scaled:
        run(port, generation, observations[0], seed)
    true, *others = scaled
    return Correlation(
        upstream,
        downstream,
        errors[full.blocks.index(upstream), 1:],
        errors[full.blocks.index(downstream), 1:],
        step,
        np.array(betas),
        np.array([float(relative(item.upstream, true.upstream).mean()) for item in others]),
        np.array([float(relative(item.downstream, true.downstream).mean()) for item in others]),
    )


class _Scaled(Generation):
    """Everything is computed, but at one step the upstream block adds b + beta (b of step 0 - b)."""

    def __init__(self, upstream: str, downstream: str, step: int, beta: float) -> None:
        self._names, self._step, self._beta = (upstream, downstream), step, beta
        self._first: Tensor
        self.upstream = self.downstream = torch.empty(0)

    def layer(self, call: LayerCall) -> Tensor:
        upstream, downstream = self._names

        def route(name: str, compute: Callable[[], Tensor]) -> Tensor:
            added = compute()
            if name == upstream and call.step == 0:
                self._first = added
            if call.step == self._step and name == upstream:
                self.upstream = added = added + self._beta * (self._first - added)
            if call.step == self._step and name == downstream:
                self.downstream = added
            return added

        return call.routed(route)


def feature_maps(
    port: Port, schedule: Schedule, blocks: Sequence[str], batch: Any, seed: int = 0, *, named: str = "schedule"
) -> FeatureMaps:
    """Of the first sample of a batch, the mean over tokens of what each of the blocks adds at each step.

    Args:
        port: The policy.
        schedule: What to compare the full run with.
        blocks: Some of the policy's.
        batch: Observations.
        seed: Of the noise.
        named: What the result calls the schedule.
    """
    check_fit(schedule.fingerprint, port)
    if odd := [name for name in blocks if name not in schedule.updates]:
        raise AnalysisError(f"no block {odd[0]!r}, the policy's are {schedule.blocks[0]} to {schedule.blocks[-1]}")
    one = rows(batch, 0, 1)
    truth, cached = (residuals(port, item, one, seed, blocks) for item in (every_step(port), schedule))
    if len({found.shape for found in truth.values()}) > 1:
        raise AnalysisError("The blocks' outputs have different shapes, which one picture cannot hold.")
    marks = dict(zip(schedule.updates, update_marks(schedule), strict=True))
    updates = np.array([marks[name] for name in blocks])
    return FeatureMaps(named, tuple(blocks), _maps(truth, blocks), _maps(cached, blocks), updates)


def _maps(found: dict[str, Tensor], blocks: Sequence[str]) -> Array:
    """(K, 1, T, d) by block -> (blocks, K, d)."""
    return np.stack([found[name][:, 0].mean(dim=1).cpu().numpy() for name in blocks]).astype(np.float32)


def weaker_policy(
    policies: Sequence[tuple[str, Port, Schedule]], observations: Sequence[Any], seed: int = 0, *, method: str
) -> WeakerPolicy:
    """What a schedule does to the actions of a good and of a weak policy, in units of each policy's own noise floor.

    Args:
        policies: Name, port and schedule of the good one, then of the weak one.
        observations: Batches, the same for both.
        seed: Of the noise.
        method: What both schedules are, in a word.
    """
    if len(policies) != 2:
        raise AnalysisError(f"a good and a weak policy are compared, got {len(policies)}")
    (_, one, _), (_, other, _) = policies
    if one.inputs != other.inputs:
        raise AnalysisError("the weaker policy takes other observations than the policy; name one of the same task")
    errors, floors = zip(
        *(_action_error(port, schedule, observations, seed) for _, port, schedule in policies), strict=True
    )
    names = policies[0][0], policies[1][0]
    return WeakerPolicy(method, names, np.array(errors), np.array(floors))


def _action_error(port: Port, schedule: Schedule, observations: Sequence[Any], seed: int) -> tuple[float, float]:
    """The schedule's action error, and the noise floor."""

    def act(batch: Any, noise: int) -> NDArray[np.float64]:
        returned = generate(getattr(port.policy, port.entry), port.prepare_observation(batch), noise)
        return np.asarray(port.action_of(returned).detach().cpu(), dtype=np.float64)

    full, again = (actions(act, observations, seed + more) for more in (0, OTHER_NOISE))
    with accelerate(port, schedule, engine="patched"):
        cached = actions(act, observations, seed)
    scale = port.action_scale
    return action_error(cached, full, scale).mean, action_error(again, full, scale).mean
