"""What `eval --clock` says, as clocks: latencies that are fixed, recorded or measured live. Knows nothing of policies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockcache.errors import FileError, shortened
from blockcache.files import read_bytes
from blockcache.results.rollouts import EvaluationError
from blockcache.results.timings import Timings
from blockcache.tasks import Clock

LIVE = "live"
_FIXED = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_BYTES = 2**24


@dataclass(frozen=True, eq=False)
class Latencies:
    """Seconds per chunk, for all methods alike or by method's name; None: measured live."""

    seconds: tuple[float, ...] | Mapping[str, tuple[float, ...]] | None

    def of(self, method: str) -> tuple[float, ...] | None:
        """A method's own, or a sentence saying that nobody timed it."""
        if not isinstance(self.seconds, Mapping):
            return self.seconds
        if method not in self.seconds:
            known = shortened(", ".join(self.seconds), 200)
            raise EvaluationError(f"the clock file has no times of the method {method}; it has those of {known}")
        return self.seconds[method]


def read_latencies(text: str) -> Latencies:
    """Latencies as the command line says them.

    Args:
        text: "live"; a time such as "40ms" or "0.4s"; a timings file that `eval` wrote, each method with its own times; or a
            text file with a number of seconds in each line.
    """
    if text == LIVE:
        return Latencies(None)
    if fixed := _FIXED.fullmatch(text):
        return Latencies((float(fixed[1]) / (1000 if fixed[2] == "ms" else 1),))
    if not Path(text).is_file():
        raise EvaluationError(f"a clock is live, a time such as 40ms or 0.4s, or a file of recorded times, got {text}")
    data = read_bytes(text, "clock file", _BYTES)
    if data.lstrip()[:1] == b"{" or text.endswith(".gz"):
        found = Timings.load(text).seconds
        return Latencies({name: tuple(latency.seconds.tolist()) for name, latency in found.items()})
    lines = [line for line in data.decode("utf-8", "replace").split("\n") if line.strip()]
    if not lines:
        raise FileError(f"the clock file {text} is empty: it needs a number of seconds in each line")
    seconds = []
    for line in lines:
        try:
            value = float(line)
        except ValueError:
            value = np.nan
        if not 0 <= value < np.inf:
            raise FileError(
                f"the clock file {text} needs a number of seconds, 0 or more, in each line, got {shortened(line, 40)!r}"
            )
        seconds.append(value)
    return Latencies(tuple(seconds))


def describe_clocks(clocks: Mapping[str, Clock]) -> dict[str, Any]:
    """The clocks of all methods, in JSON types; of times that are known their number and median.

    Args:
        clocks: By method's name.
    """
    shared = next(iter(clocks.values())).describe()
    del shared["seconds"]
    times = {}
    for name, clock in clocks.items():
        known = clock.seconds
        times[name] = {"chunks": len(known), "median_ms": float(np.median(known)) * 1e3} if known else {}
    return {**shared, "latency": times}


def choose_clock(seconds: tuple[float, ...] | None, action_steps: int, **settings: Any) -> Clock:
    """A clock of which replanning may be left open: half of the executed actions, all of them if the robot stops to think.

    Args:
        seconds: As `Clock` takes them.
        action_steps: The policy's `n_action_steps`.
        settings: Of the clock; `replan` may be None.
    """
    replan = settings.pop("replan", None)
    if replan is None:
        replan = action_steps if settings.get("stop") else max(1, action_steps // 2)
    return Clock(replan=replan, seconds=seconds, **settings)
