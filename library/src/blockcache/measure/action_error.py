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

Act: TypeAlias = Callable[[Any, int], NDArray[np.float64]]
"""(a batch of observations, seed) -> executed actions (B, n_action, A); noise depends on the seed alone."""


@dataclass(frozen=True)
class ActionError:
    """Mean over all samples and actions, and the 95th percentile of each sample's first action."""

    mean: float
    first_p95: float


def actions(act: Act, observations: Sequence[Any], seed: int) -> NDArray[np.float64]:
    """Executed actions of all batches, (N, n_action, A); noise depends on the seed and the batch's place.

    Args:
        act: Draws the actions of one batch.
        observations: Batches, in the form in which `act` takes them.
        seed: Of the first batch; each further one has the next seed.
    """
    return np.concatenate([act(batch, seed + index) for index, batch in enumerate(observations)])


def action_error(found: NDArray[np.float64], expected: NDArray[np.float64], scale: NDArray[np.float64]) -> ActionError:
    """The mean absolute difference of actions that were drawn with the same noise, in normalised units.

    Args:
        found: (N, n_action, A) of the method that is judged, in robot units.
        expected: The same of the full policy.
        scale: (A,) normalised units in one robot unit.
    """
    error = np.abs(found - expected) * scale
    return ActionError(float(error.mean()), float(np.percentile(error[:, 0].mean(axis=-1), 95)))
