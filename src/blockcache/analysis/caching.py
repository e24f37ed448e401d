"""Caching error: how far the residual that a schedule adds is from the one that the full run would add.

`|b^ - b| / |b|` (L2) for every block and step, `b` from a full run with the same noise. At an update step the error comes
from upstream (update-induced), elsewhere from reuse as well (reuse-induced).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.attach.generation import Generation, LayerCall, attach
from blockcache.engines.accelerate import check_fit
from blockcache.errors import ObservationError
from blockcache.models.pairing import generate
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.progress import progress_bar
from blockcache.schedule import Reuse, Schedule, compile_plan


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


def caching_error(
    policy: Any, schedule: Schedule, observations: Sequence[Any], seed: int = 0, progress: str | None = None
) -> CachingError:
    """Run each batch of observations twice, in full and by the schedule, and compare what each block added."""
    port = port_of(policy)
    check_fit(schedule.fingerprint, port)
    full = Schedule.every_step(schedule.steps, schedule.blocks)
    total, samples = np.zeros((len(schedule.blocks), schedule.steps)), 0
    batches = progress_bar(observations, progress, unit="batch", disable=progress is None, delay=1.0, leave=False)
    for index, batch in enumerate(batches):
        true = _residuals(port, full, batch, seed + index)
        used = _residuals(port, schedule, batch, seed + index)
        for row, name in enumerate(schedule.blocks):
            difference = (used[name] - true[name]).flatten(2).norm(dim=2)  # (K, B)
            norm = true[name].flatten(2).norm(dim=2).clamp_min(torch.finfo(torch.float32).tiny)
            total[row] += (difference / norm).sum(dim=1).cpu().numpy()
        samples += true[schedule.blocks[0]].shape[1]
    if not samples:
        raise ObservationError("a caching error needs at least one batch of observations, got none")
    updates = np.array([[step in steps for step in range(schedule.steps)] for steps in schedule.update_sets.values()])
    return CachingError(schedule.blocks, total / samples, updates)


@torch.no_grad()  # a graph over all steps would take gigabytes
def _residuals(port: Port, schedule: Schedule, batch: Any, seed: int) -> dict[str, Tensor]:
    """What each block added at each step, (K, B, T, d)."""
    noting = _NotingGeneration(schedule)
    patches = attach(port, lambda: noting)
    try:
        generate(getattr(port.policy, port.entry), port.given(batch), seed)
    finally:
        patches.remove()
    return {name: torch.stack(residuals) for name, residuals in noting.used.items()}


class _NotingGeneration(Generation):
    """Follows a schedule and notes what each block adds."""

    def __init__(self, schedule: Schedule) -> None:
        self.reuse: Reuse[Tensor] = Reuse(compile_plan(schedule))
        self.used: dict[str, list[Tensor]] = {name: [] for name in schedule.blocks}

    def layer(self, call: LayerCall) -> Tensor:
        def route(name: str, compute: Callable[[], Tensor]) -> Tensor:
            self.used[name].append(self.reuse.block(call.step, name, compute))
            return self.used[name][-1]

        return call.routed(route)
