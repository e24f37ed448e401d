"""A box of time: work is begun only if it should fit, ends where it does not, and is told of where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from blockcache.progress import watched

EVERY = 15.0  # seconds between two lines where there is no terminal


class TimeUpError(Exception):
    """There is no time left for this; what was finished is kept."""


class TimeBox:
    """Minutes that may be used.

    Args:
        minutes: How many.
        started: When they began, by `time.monotonic`; now unless given.
        progress: Whether to write a line now and then, where standard error is no terminal that shows bars.
    """

    def __init__(self, minutes: float, started: float | None = None, progress: bool = True) -> None:
        self.started = self._told = time.monotonic() if started is None else started
        self.seconds, self.doing = 60 * minutes, ""
        self.tells = progress and not sys.stderr.isatty()

    @property
    def passed(self) -> float:
        return time.monotonic() - self.started

    def left(self, share: float = 1.0) -> float:
        """Seconds until that share of the box is used up; below 0 after it."""
        return share * self.seconds - self.passed

    def check(self, seconds: float, share: float = 1.0) -> None:
        """Raise TimeUpError unless so many seconds of work end within that share of the box."""
        if seconds > self.left(share):
            raise TimeUpError(f"it takes about {seconds:.0f} s")

    @contextmanager
    def working(self, doing: str, share: float) -> Iterator[None]:
        """Every step of a bar inside tells people what is being done, and raises TimeUpError once that share is used up."""
        self.doing = doing

        def step() -> None:
            self.check(0.0, share)
            if self.tells and time.monotonic() > self._told + EVERY:
                self._told = time.monotonic()
                print(f"{self.passed:.0f} of {self.seconds:.0f} s: {self.doing}", file=sys.stderr, flush=True)

        with watched(step):
            yield
