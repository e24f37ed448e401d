"""Statistics of paired rollouts, and how smooth a rollout's actions are. Plain arrays in, plain values out.

Knows nothing of policies, tasks or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest, rankdata

RESAMPLES, SEED = 10_000, 0
LOSSLESS = -0.03  # the lower end of a lossless method's interval lies above this


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval, which is infinite where a single value says nothing of the spread."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def lossless(self) -> bool:
        """For a paired difference of scores: a loss of 0.03 or more is ruled out."""
        return self.low > LOSSLESS

    @property
    def settled(self) -> bool:
        """For such a difference: it is lossless, or a loss is shown; more pairs would not change that."""
        return self.lossless or self.high < 0

    def text(self, form: str) -> str:
        """For tables: `form` is that of one number, such as "{:+.3f}"; an infinite interval is left out."""
        mean, low, high = (_unsigned_zero(form.format(value), form) for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]" if math.isfinite(self.low) else mean


def _unsigned_zero(text: str, form: str) -> str:
    """A difference of rounding errors is no loss: "+0.000" instead of "-0.000"."""
    return form.format(0.0) if text == form.format(-0.0) else text


@dataclass(frozen=True)
class McNemar:
    """Pairs in which only one of two methods succeeded, and the exact two-sided p of so uneven a split by chance."""

    only_found: int
    only_baseline: int
    p: float


def mean_interval(values: ArrayLike) -> Estimate:
    """The mean with its 95 % interval: Wilson's for successes (values that are all 0 or 1), otherwise a bootstrap.

    Args:
        values: A row of finite numbers, or of truth values.
    """
    array = _checked(values)
    if len(array) == 1 or not _successes(array):
        return _bootstrap(array)
    found = binomtest(int(array.sum()), len(array)).proportion_ci(method="wilson")
    return Estimate(float(array.mean()), float(found.low), float(found.high), len(array))


def paired_difference(found: ArrayLike, baseline: ArrayLike) -> Estimate:
    """found - baseline, pair by pair, with its 95 % interval.

    Args:
        found: A value for each pair, of the method that is judged.
        baseline: A value for each pair, of what it is compared with, in the same order.
    """
    one, other = _checked(found), _checked(baseline)
    if one.shape != other.shape:
        raise ValueError(f"pairs need as many values on both sides, got {len(one)} and {len(other)}")
    return difference_interval(one - other, of_successes=_successes(one) and _successes(other))


def difference_interval(differences: ArrayLike, *, of_successes: bool) -> Estimate:
    """The mean of paired differences with its 95 % bootstrap interval.

    Fifty pairs without a loss do not rule out one in fifty, but a bootstrap can only draw what it has seen. So where a
    pair is won, lost or neither, it draws from one won and one lost pair more. That agrees with McNemar's test: it
    takes 6 losses and no win to tell two methods apart.

    Args:
        differences: One for each pair.
        of_successes: Whether each is -1, 0 or 1: a pair lost, drawn or won.
    """
    return _bootstrap(_checked(differences), unseen=(-1.0, 1.0) if of_successes else ())


def interval_of(statistic: Callable[..., NDArray[np.float64]], *rows: ArrayLike) -> Estimate:
    """A value that follows from the means of several rows, with its 95 % interval by resampling all rows together.

    Args:
        statistic: Takes an array of means for each row and gives as many values, such as `np.divide` for a ratio of means.
        rows: As many values each.
    """
    values = np.stack([_checked(row) for row in rows])
    n = values.shape[1]
    mean = float(statistic(*values.mean(axis=1, keepdims=True))[0])
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, n)
    times = np.random.default_rng(SEED).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)  # how often each is drawn
    low, high = np.percentile(statistic(*(values @ times.T / n)), (2.5, 97.5))
    return Estimate(mean, min(float(low), mean), max(float(high), mean), n)


def _bootstrap(values: NDArray[np.float64], unseen: tuple[float, ...] = ()) -> Estimate:
    """Percentiles of 10,000 resampled means, with a fixed seed. `unseen` values are drawn too, but not in the mean.

    Not scipy's bootstrap: that gives NaN for values that are all equal, a common outcome here, and the name of its seed
    differs between the versions of scipy that we support.
    """
    mean, n = float(values.mean()), len(values)
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, n)
    drawn = np.concatenate((values, unseen))
    rng, blocks = np.random.default_rng(SEED), 10  # in blocks, so that thousands of values do not fill the memory
    size = (RESAMPLES // blocks, len(drawn))
    means = [drawn[rng.integers(len(drawn), size=size)].mean(axis=1) for _ in range(blocks)]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    # A mean of equal values can round to a neighbour of the value; an interval must not lie beside its own mean.
    return Estimate(mean, min(float(low), mean), max(float(high), mean), n)


def _successes(values: NDArray[np.float64]) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def mcnemar(found: ArrayLike, baseline: ArrayLike) -> McNemar:
    """The exact McNemar test on paired successes.

    Args:
        found: Whether the method that is judged succeeded, for each pair.
        baseline: The same of what it is compared with, in the same order.
    """
    one, other = np.asarray(found, dtype=bool), np.asarray(baseline, dtype=bool)
    if one.ndim != 1 or one.shape != other.shape:
        raise ValueError(f"pairs need as many values on both sides, got shapes {one.shape} and {other.shape}")
    won, lost = int((one & ~other).sum()), int((~one & other).sum())
    p = float(binomtest(won, won + lost, 0.5).pvalue) if won + lost else 1.0
    return McNemar(won, lost, p)


def rank_correlation(one: ArrayLike, other: ArrayLike) -> float:
    """Spearman's: 1 where both put things into the same order; equal values share their ranks, and 0 if all are equal.

    Args:
        one: A row of numbers.
        other: As many numbers, each of the same thing as that at its place in `one`.
    """
    a, b = rankdata(one), rankdata(other)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else 0.0


def mean_jerk(actions: NDArray[np.float64]) -> float | None:
    """Mean length of the third difference of actions (..., steps, A), in their units per step cubed; None below 4 steps.

    Args:
        actions: (..., steps, A), in the order in which they are executed.
    """
    if actions.shape[-2] < 4:
        return None
    return float(np.linalg.norm(np.diff(actions, n=3, axis=-2), axis=-1).mean())


def seam_jump(actions: NDArray[np.float64], seams: Sequence[int]) -> float | None:
    """Mean distance between the last action of a chunk and the first of the next; None where there is but one chunk.

    Args:
        actions: (steps, A), as executed.
        seams: Places of first actions of chunks, but for the very first.
    """
    first = np.asarray(seams, dtype=np.int64)
    return float(np.linalg.norm(actions[first] - actions[first - 1], axis=-1).mean()) if len(first) else None


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ValueError(f"statistics need a row of one or more finite numbers, got shape {array.shape}")
    return array
