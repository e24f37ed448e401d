"""Caching error: how far the residual that a schedule adds is from the one that the full run would add.

`|b^ - b| / |b|` (L2) for every block and step, `b` from a full run with the same noise. At an update step the error comes
from upstream (update-induced), elsewhere from reuse as well (reuse-induced).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.engines.accelerate import check_fit
from blockcache.errors import ObservationError
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.progress import progress_bar
from blockcache.results.analysis_section import AnalysisError
from blockcache.results.analysis_sections import Caching
from blockcache.schedule import Schedule
from blockcache_lab.analysis.residuals import everything, relative, residuals, update_marks


@dataclass(frozen=True, eq=False)
class CachingError:
    """`errors` (blocks, K), averaged over samples; `updates` (blocks, K) marks the update steps."""

    blocks: tuple[str, ...]
    errors: NDArray[np.float64]
    updates: NDArray[np.bool_]

    @property
    def per_block(self) -> NDArray[np.float64]:
        return np.asarray(self.errors.mean(axis=1))

    @property
    def update_induced(self) -> float:
        return float(self.errors[self.updates].mean())

    @property
    def reuse_induced(self) -> float:
        return float(self.errors[~self.updates].mean()) if (~self.updates).any() else 0.0


def caching_errors(
    policy: Any,
    schedules: Mapping[str, Schedule],
    observations: Sequence[Any],
    seed: int = 0,
    progress: str | None = None,
) -> Caching:
    """Run each batch of observations in full and by every schedule, and compare what each block added.

    policy        the policy object, ours or foreign (or its port)
    schedules     by the names that the result knows them by
    observations  batches as the policy takes them; all samples count alike
    seed          the noise depends on it and the batch's place alone
    progress      the words before a bar, if there is to be one
    """
    if not schedules:
        raise AnalysisError("a caching error is that of a schedule, and there is none")
    errors = _errors(port_of(policy), list(schedules.values()), observations, seed, progress)
    updates = np.array([update_marks(schedule) for schedule in schedules.values()])
    return Caching(tuple(schedules), errors, updates)


def caching_error(
    policy: Any, schedule: Schedule, observations: Sequence[Any], seed: int = 0, progress: str | None = None
) -> CachingError:
    """The same for one schedule."""
    (errors,) = _errors(port_of(policy), [schedule], observations, seed, progress)
    return CachingError(schedule.blocks, errors, np.array(update_marks(schedule)))


def _errors(
    port: Port, schedules: Sequence[Schedule], observations: Sequence[Any], seed: int, progress: str | None
) -> NDArray[np.float64]:
    """(schedules, blocks, K), means over samples."""
    for schedule in schedules:
        check_fit(schedule.fingerprint, port)
    full = everything(port)
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
