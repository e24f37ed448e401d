"""Latency of plain callables, all candidates interleaved in one run. Knows nothing of caching."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockcache.progress import progress_bar

Name = TypeVar("Name", bound=Hashable)

REST = 0.01  # seconds


@dataclass(frozen=True, eq=False)
class Latency:
    """Seconds of every timed call, in the order in which they were made."""

    seconds: NDArray[np.float64]

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.seconds, percent))

    @property
    def p50(self) -> float:
        return self.percentile(50)

    def over(self, other: Latency) -> float:
        """How many times faster than `other`: the median ratio of calls made in the same round.

        Rounds share whatever else the machine was doing, so their ratios are steadier than a ratio of medians.
        """
        return float(np.median(other.seconds / self.seconds))


def measure(
    candidates: Mapping[Name, Callable[[], Any]],
    repeats: int,
    warmup: int = 2,
    progress: bool = True,
    period: float = 0.0,
) -> dict[Name, Latency]:
    """Time each candidate `repeats` times, one call each in turn; the order rotates from round to round.

    A short rest before each call lets the threads of the one before come to rest too: torch's keep spinning for a while.

    Args:
        candidates: Calls by name, or by whatever tells them apart.
        repeats: Timed calls of each.
        warmup: Calls of each before.
        progress: Whether to show a bar.
        period: Seconds from the start of a call to that of the next, at least: a control loop calls now and then, which is
            another thing for threads and caches than calls back to back.
    """
    names = list(candidates)
    for name in names:
        for _ in range(warmup):
            candidates[name]()
    seconds = {name: np.empty(repeats) for name in names}
    started = -period
    for turn in progress_bar(range(repeats), "timing", unit="round", disable=not progress, delay=1.0):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            time.sleep(max(REST, started + period - time.perf_counter()))
            started = time.perf_counter()
            candidates[name]()
            seconds[name][turn] = time.perf_counter() - started
    return {name: Latency(values) for name, values in seconds.items()}
