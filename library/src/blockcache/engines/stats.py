"""What an acceleration did so far: how often each block was computed and how often its output was used again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counts over all finished generations, per block in execution order.

    Steps for a schedule, whatever the batch size; sample-steps for TeaCache, which decides for each sample. `notes`
    says what a reader of the numbers must know, such as a schedule that was made for other weights.
    """

    engine: str
    generations: int
    computed: Mapping[str, int]
    reused: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def reused_share(self) -> float:
        reused = sum(self.reused.values())
        total = reused + sum(self.computed.values())
        return reused / total if total else 0.0


class Counts:
    """Adds up runs from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._computed: Counter[str] = Counter()
        self._reused: Counter[str] = Counter()
        self._generations = 0

    def add(self, computed: Mapping[str, int], reused: Mapping[str, int]) -> None:
        with self._lock:
            self._generations += 1
            self._computed.update(computed)
            self._reused.update(reused)

    def stats(self, engine: str, blocks: tuple[str, ...], notes: tuple[str, ...]) -> Stats:
        with self._lock:
            computed, reused = ({name: found[name] for name in blocks} for found in (self._computed, self._reused))
            return Stats(engine, self._generations, computed, reused, notes)
