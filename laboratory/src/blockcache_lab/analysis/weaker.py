"""Whether caching hurts a weak policy more than a good one: action errors in units of each policy's own noise floor.

The noise floor is what two full runs with different noise differ by. Knows nothing of tasks and scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.engines.accelerate import accelerate
from blockcache.measure.action_error import action_error, actions
from blockcache.models.pairing import generate
from blockcache.models.port import Port
from blockcache.results.analysis_section import AnalysisError
from blockcache.results.analysis_sections import WeakerPolicy
from blockcache.schedule import Schedule

OTHER_NOISE = 10_000
"""Added to the seed for the second full run."""


def weaker_policy(
    policies: Sequence[tuple[str, Port, Schedule]], observations: Sequence[Any], seed: int = 0, *, method: str
) -> WeakerPolicy:
    """What a schedule does to the actions of a good and of a weak policy.

    policies      name, port and schedule of the good one, then of the weak one
    observations  batches, the same for both
    seed          of the noise
    method        what both schedules are, in a word
    """
    if len(policies) != 2:
        raise AnalysisError(f"a good and a weak policy are compared, got {len(policies)}")
    (_, one, _), (_, other, _) = policies
    if one.inputs != other.inputs:
        raise AnalysisError("the weaker policy takes other observations than the policy; name one of the same task")
    errors, floors = zip(*(_harm(port, schedule, observations, seed) for _, port, schedule in policies), strict=True)
    names = policies[0][0], policies[1][0]
    return WeakerPolicy(method, names, np.array(errors), np.array(floors))


def _harm(port: Port, schedule: Schedule, observations: Sequence[Any], seed: int) -> tuple[float, float]:
    """The schedule's action error, and the noise floor."""

    def act(batch: Any, noise: int) -> NDArray[np.float64]:
        returned = generate(getattr(port.policy, port.entry), port.prepare_observation(batch), noise)
        return np.asarray(port.action_of(returned).detach().cpu(), dtype=np.float64)

    full, again = (actions(act, observations, seed + more) for more in (0, OTHER_NOISE))
    with accelerate(port, schedule, engine="patched"):
        cached = actions(act, observations, seed)
    scale = port.action_scale
    return action_error(cached, full, scale).mean, action_error(again, full, scale).mean
