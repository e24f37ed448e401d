"""How far a policy's actions are from those of the full policy, open loop. Takes plain callables.

Errors are mean absolute differences over the executed slice, in normalised units (the demonstrations' range is 2). The
noise floor is the same measure between two runs of the full policy with different noise: what the policy itself
considers equally good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockcache.progress import progress_bar

Act: TypeAlias = Callable[[Any, int], NDArray[np.float64]]
"""(a batch of observations, seed) -> executed actions (B, n_action, A); noise depends on the seed alone."""


@dataclass(frozen=True)
class ActionError:
    """Mean over all samples and actions, and the 95th percentile of each sample's first action."""

    mean: float
    first_p95: float


def actions(act: Act, observations: Sequence[Any], seed: int, progress: str | None = None) -> NDArray[np.float64]:
    """Executed actions of all batches, (N, n_action, A); noise depends on the seed and the batch's place."""
    batches = progress_bar(observations, progress, unit="batch", disable=progress is None, delay=1.0, leave=False)
    return np.concatenate([act(batch, seed + index) for index, batch in enumerate(batches)])


def action_error(found: NDArray[np.float64], expected: NDArray[np.float64], scale: NDArray[np.float64]) -> ActionError:
    """`scale` (A,) turns robot units into normalised ones."""
    error = np.abs(found - expected) * scale
    return ActionError(float(error.mean()), float(np.percentile(error[:, 0].mean(axis=-1), 95)))
