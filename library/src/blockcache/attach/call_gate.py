"""Who is inside a call just now, so that what the call needs is not taken away meanwhile. Knows nothing of policies."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from blockcache.errors import PolicyError


class CallGate:
    """Any number of threads may be `inside` at once; `paused` waits until they have left and lets nobody in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: Counter[int] = Counter()  # how often each thread is inside: a call may lead to another one
        self._paused = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._paused or me in self._threads)
            self._threads[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._threads[me] -= 1
                if not self._threads[me]:
                    del self._threads[me]
                    self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._changed:
            if threading.get_ident() in self._threads:
                raise PolicyError(
                    "the acceleration cannot be disabled from within a generation of its policy, which still needs it; "
                    "call disable() when predict_action has returned"
                )
            self._changed.wait_for(lambda: not self._paused)
            self._paused = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._threads)
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()
