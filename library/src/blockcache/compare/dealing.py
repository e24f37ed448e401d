"""Observations dealt to purposes: no observation serves two, so that nothing is judged on what it was chosen by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from blockcache.errors import ObservationError
from blockcache.observations import RECORDING, batch_size, pick, rows, split
from blockcache.results.rollouts import GENERATIONS

CALIBRATION, COMPARISON, FITTING, DISTANCES = "calibration", "comparison", "fitting", "distances"
COMPARED, FITTED = 32, 32
"""Observations to compare actions on, and to place and fit samplers on; at most."""
WANTED, LEAST = {CALIBRATION: GENERATIONS, FITTING: 32, DISTANCES: 24}, 8
"""Observations for each purpose of a tuning. Fewer where there are fewer, but never below the least."""


def count_given(observations: Any, what: str) -> int:
    """How many observations were given; where there are none, the error says how to get some.

    Args:
        observations: A batch, or whatever else was given.
        what: Is done with them, for the error.
    """
    try:
        return batch_size(observations)
    except ObservationError as error:
        raise ObservationError(f"{what} needs observations that the policy meets, {RECORDING}; {error}") from error


def deal(
    observations: Any, in_order: Mapping[str, int], drawn: Mapping[str, int] | None = None, seed: int = 0
) -> dict[str, Any]:
    """A batch for each purpose; one that nothing is left for is missing.

    Args:
        observations: A batch.
        in_order: Samples for each purpose, from the first on, as far as there are any.
        drawn: Samples for each further purpose, drawn from the rest; too few are refused.
        seed: Another one draws others.
    """
    dealt, start = {}, 0
    for name, size in in_order.items():
        if start < batch_size(observations):
            dealt[name] = rows(observations, start, start + size)
        start += size
    taken = rows(observations, 0, start) if start else None
    places = split(observations, drawn, seed, taken=taken) if drawn else {}
    return dealt | {name: pick(observations, own) for name, own in places.items()}


def deal_for_evaluation(observations: Any, generations: int) -> dict[str, Any]:
    """To calibrate on, to compare actions on, to place and fit samplers on, and the rest to measure distances at.

    Args:
        observations: A batch.
        generations: Samples to calibrate on.
    """
    sizes = {CALIBRATION: generations, COMPARISON: COMPARED, FITTING: FITTED, DISTANCES: batch_size(observations)}
    return deal(observations, sizes)


def sizes_for_tuning(total: int) -> dict[str, int]:
    """How many observations each purpose of a tuning gets.

    Args:
        total: Of so many.
    """
    spare, wanted = total - LEAST * len(WANTED), sum(WANTED.values()) - LEAST * len(WANTED)
    share = min(1.0, max(0, spare) / wanted)
    return {name: LEAST + math.floor(share * (size - LEAST)) for name, size in WANTED.items()}
