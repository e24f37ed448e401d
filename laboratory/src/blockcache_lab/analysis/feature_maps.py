"""What some blocks add over the steps of one generation, in full and under a schedule: pictures of what reuse does.

Knows nothing of plots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from blockcache.engines.accelerate import check_fit
from blockcache.models.port import Port
from blockcache.observations import rows
from blockcache.results.analysis_section import AnalysisError, Array
from blockcache.results.analysis_sections import FeatureMaps
from blockcache.schedule import Schedule
from blockcache_lab.analysis.residuals import everything, residuals


def feature_maps(
    port: Port, schedule: Schedule, blocks: Sequence[str], batch: Any, seed: int = 0, *, named: str = "schedule"
) -> FeatureMaps:
    """Of the first sample of a batch, the mean over tokens of what each of the blocks adds at each step.

    port      the policy
    schedule  what reuses
    blocks    some of the policy's
    batch     observations
    seed      of the noise
    named     what the result calls the schedule
    """
    check_fit(schedule.fingerprint, port)
    if odd := [name for name in blocks if name not in schedule.updates]:
        raise AnalysisError(f"no block {odd[0]!r}, the policy's are {schedule.blocks[0]} to {schedule.blocks[-1]}")
    one = rows(batch, 0, 1)
    truth, cached = (residuals(port, item, one, seed, blocks) for item in (everything(port), schedule))
    if len({found.shape for found in truth.values()}) > 1:
        raise AnalysisError("The blocks' outputs have different shapes, which one picture cannot hold.")
    updates = [[step in schedule.update_sets[name] for step in range(schedule.steps)] for name in blocks]
    return FeatureMaps(named, tuple(blocks), _maps(truth, blocks), _maps(cached, blocks), np.array(updates))


def _maps(found: dict[str, Tensor], blocks: Sequence[str]) -> Array:
    """(K, 1, T, d) by block -> (blocks, K, d)."""
    return np.stack([found[name][:, 0].mean(dim=1).cpu().numpy() for name in blocks]).astype(np.float32)
