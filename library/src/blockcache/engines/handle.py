"""The handle of an accelerated policy, and what it counts: how often each block was computed and how often it was reused."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from blockcache.attach.patching import Patches
from blockcache.errors import PolicyError
from blockcache.models.port import Port
from blockcache_runtime.guard import GuardWatch


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
        self._generations = self._alike = 0
        self._last: tuple[Mapping[str, int], Mapping[str, int]] = {}, {}

    def add(self, computed: Mapping[str, int], reused: Mapping[str, int]) -> None:
        """One generation. The mappings stay as they are."""
        with self._lock:
            if self._last[0] is not computed or self._last[1] is not reused:
                self._add_up()
                self._last = computed, reused
            self._alike += 1  # a schedule gives the same ones at every call, which are added up when somebody asks

    def _add_up(self) -> None:
        for total, last in zip((self._computed, self._reused), self._last, strict=True):
            total.update({name: self._alike * count for name, count in last.items()})
        self._generations += self._alike
        self._alike = 0

    def stats(self, engine: str, blocks: tuple[str, ...], notes: tuple[str, ...]) -> Stats:
        with self._lock:
            self._add_up()
            computed, reused = ({name: found[name] for name in blocks} for found in (self._computed, self._reused))
            return Stats(engine, self._generations, computed, reused, notes)


@dataclass(frozen=True, eq=False)
class PreparedEngine:
    """An engine that can take the policy's place.

    Args:
        patches: Put the engine in place, and undo that.
        settle: To be called once the engine is in place.
        verify: Raises a `StaleError` if the policy is no longer what the engine was made of.
        noticed_within: Calls after which any change of weights or settings was noticed.
        rehearsal_seconds: What comparing it with the policy's own actions took.
    """

    patches: Patches
    settle: Callable[[], None] = lambda: None
    verify: Callable[[], None] = lambda: None  # an engine that copies nothing has nothing to verify
    noticed_within: int = 1
    rehearsal_seconds: float = 0.0


class Acceleration(AbstractContextManager["Acceleration"]):
    """An accelerated policy: use it as the policy, or the policy itself, until `disable()` or the end of the `with`."""

    def __init__(
        self,
        policy: Any,
        port: Port,
        engine: str,
        prepared: PreparedEngine,
        counts: Counts,
        notes: tuple[str, ...],
        watch: GuardWatch | None = None,
    ) -> None:
        self.policy, self.engine, self.watch = policy, engine, watch
        self.noticed_within = prepared.noticed_within
        """Calls after which a change of weights or settings was noticed, see `accelerate`; patched reads them anyway."""
        self.rehearsal_seconds = prepared.rehearsal_seconds
        """What comparing with the policy's own actions took, see `accelerate`; 0 if that was not needed, or left out."""
        self._blocks = tuple(block.name for block in port.adapter.blocks)
        self._patches, self._verify = prepared.patches, prepared.verify
        self._counts, self._notes, self._entry = counts, notes, port.entry
        prepared.patches.handle = self  # for `handle_of`

    @property
    def enabled(self) -> bool:
        return bool(self._patches)

    @property
    def predict_action(self) -> Callable[..., Any]:
        """The policy's entry, accelerated, with the signature of its own: callers look for `generator` in it."""

        @functools.wraps(getattr(self.policy, self._entry), updated=())
        def predict_action(*args: Any, **kwargs: Any) -> Any:
            self._require_enabled()
            return getattr(self.policy, self._entry)(*args, **kwargs)

        return predict_action

    def stats(self) -> Stats:
        """What was computed and what was reused since enabling."""
        return self._counts.stats(self.engine, self._blocks, self._notes)

    def verify(self) -> None:
        """Make sure that the policy is still what the engine was made of; a `StaleError` says what is not.

        Reads every byte of the weights and every setting, and then runs a few generations beside the policy's own, which
        takes about as long as those do. The patched engine runs the policy as it is: there is nothing to verify.
        """
        self._require_enabled()
        self._verify()

    def disable(self) -> None:
        """Put the policy back exactly as it was, when the generations of other threads have ended: it waits for them.

        Whoever calls the policy meanwhile waits too, and then gets the policy as it was. Calling it again does nothing.
        """
        self._patches.remove()
        self._verify = lambda: None  # which holds the engine

    def _require_enabled(self) -> None:
        if not self.enabled:
            raise PolicyError("this acceleration was disabled; call the policy itself, or accelerate it again")

    def __exit__(self, *raised: object) -> None:
        self.disable()
