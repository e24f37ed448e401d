"""An interval that holds at every moment at once, so that one may look after each group of pairs and stop when it suffices.

For every mean that could be, a bettor who knows only the values so far bets that the next one is higher, another that it is
lower. If that mean were true, neither could expect to gain, so either has a chance of at most 1 in 40 ever to have 40
times what it began with. Means at which one of the two got that rich are ruled out. Plain arrays in, plain values out.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockcache.measure.statistics import Estimate

ERROR = 0.05  # of both sides together
_HORIZONS = (30, 150, 800)
"""Values after which a bettor means to have decided; the fortune is shared among three."""
_BOLDEST = 0.9  # of the stake at which a single value could ruin a bettor
_GRID = 81


def valid_interval(differences: ArrayLike) -> Estimate:
    """The mean of differences from -1 to 1, in their order, with a 95 % interval that holds however long one goes on.

    Args:
        differences: One or more.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not (np.abs(values) <= 1).all():
        raise ValueError(f"an interval at any time needs a row of numbers from -1 to 1, got shape {values.shape}")
    stakes, mean = _stakes(values), float(values.mean())
    return Estimate(mean, min(_lowest(values, stakes), mean), max(-_lowest(-values, stakes), mean), len(values))


def _stakes(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(horizons, values): how much to bet on each, from what came before it alone."""
    count = np.arange(1, len(values) + 1)
    means = np.cumsum(values) / (count + 1)
    squares = np.cumsum((values - means) ** 2)
    before = (0.25 + np.concatenate(([0.0], squares[:-1]))) / count  # the spread, as if a first value were 0.5 off
    stakes: NDArray[np.float64] = np.sqrt(2 * math.log(2 / ERROR) / (before * np.array(_HORIZONS)[:, None]))
    return stakes


def _lowest(values: NDArray[np.float64], stakes: NDArray[np.float64]) -> float:
    """The largest mean below which all are shown to be too low: on a coarse grid, then on a fine one within its step."""
    low, high = -1.0, 1.0
    for _ in range(2):
        means = np.linspace(low, high, _GRID)
        poor = _richest(values, means, stakes) < math.log(2 / ERROR)
        first = int(poor.argmax()) if poor.any() else _GRID - 1
        low, high = float(means[max(0, first - 1)]), float(means[first])
    return low


def _richest(
    values: NDArray[np.float64], means: NDArray[np.float64], stakes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """For each mean, the logarithm of the largest fortune that bets on higher values ever made."""
    gains = values - means[:, None]  # (means, values)
    most = _BOLDEST / (1 + np.maximum(means, -1 + 1e-9))[:, None]
    fortunes = [np.cumsum(np.log1p(np.minimum(stake, most) * gains), axis=1) for stake in stakes]
    richest: NDArray[np.float64] = np.logaddexp.reduce(fortunes).max(axis=1) - math.log(len(fortunes))
    return richest
