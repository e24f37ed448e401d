"""`accelerate`: check that a schedule fits, choose an engine, attach it, and hand back the way to undo it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from blockcache.engines import patched
from blockcache.engines.stats import Counts, Stats
from blockcache.errors import EngineError, PolicyError, ScheduleError
from blockcache.fingerprint import Fingerprint
from blockcache.patching import Patches, is_ours
from blockcache.schedule import Schedule
from blockcache.target import Target, examine
from blockcache.teacache import Rule

ENGINES = ("auto", "patched")
OUTPUTS = ("chunk", "action")
_enabling = threading.Lock()


class Acceleration:
    """An accelerated policy: use it as the policy, or the policy itself, until `disable()` or the end of the `with`."""

    def __init__(
        self,
        policy: Any,
        engine: str,
        blocks: tuple[str, ...],
        patches: Patches,
        counts: Counts,
        notes: tuple[str, ...],
    ) -> None:
        self.policy = policy
        self.engine = engine
        self._blocks = blocks
        self._patches: Patches | None = patches
        self._counts = counts
        self._notes = notes

    @property
    def enabled(self) -> bool:
        return self._patches is not None

    def predict_action(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's own `predict_action`, accelerated."""
        if not self.enabled:
            raise PolicyError("this acceleration was disabled; call the policy itself, or accelerate it again")
        return self.policy.predict_action(*args, **kwargs)

    def stats(self) -> Stats:
        """What was computed and what was reused since enabling."""
        return self._counts.stats(self.engine, self._blocks, self._notes)

    def disable(self) -> None:
        """Put the policy back exactly as it was. Calling it again does nothing."""
        with _enabling:
            if self._patches is not None:
                self._patches.remove()
                self._patches = None

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()


def accelerate(
    policy: Any,
    schedule: Schedule | Rule | None = None,
    engine: str = "auto",
    output: str = "chunk",
    check: str = "strict",
) -> Acceleration:
    """Make the policy's `predict_action` follow a schedule (or a TeaCache rule), in place, until it is disabled.

    `check="shape"` accepts a schedule made for other weights of the same shape, and `stats()` says so.
    """
    _check_choice("engine", engine, ENGINES)
    _check_choice("output", output, OUTPUTS)
    _check_choice("check", check, ("strict", "shape"))
    with _enabling:
        if is_ours(policy, "predict_action"):
            raise PolicyError("this policy is accelerated already; call disable() first")
        target = examine(policy)
        notes = () if schedule is None else check_fit(schedule.fingerprint, target, check)
        counts = Counts()
        if isinstance(schedule, Rule):
            patches = patched.attach_rule(target, schedule, counts)
        else:
            full = Schedule.every_step(len(target.timesteps), [block.name for block in target.adapter.blocks])
            patches = patched.attach_schedule(target, schedule or full, counts)
    return Acceleration(policy, "patched", tuple(b.name for b in target.adapter.blocks), patches, counts, notes)


def check_fit(bound: Fingerprint, target: Target, check: str = "strict") -> tuple[str, ...]:
    """Refuse a schedule that was made for something else; return notes on what was let pass."""
    ignored = ("weights",) if check == "shape" else ()
    differences = bound.differences(target.fingerprint, ignored)
    if differences:
        only_weights = not bound.differences(target.fingerprint, ("weights",))
        hint = ' (or pass check="shape" to use it all the same)' if only_weights else ""
        raise ScheduleError(
            f"this schedule does not fit the policy, which has {'; '.join(differences)}; calibrate again with "
            f"'blockcache calibrate' and 'blockcache solve'{hint}"
        )
    if bound.weights != target.fingerprint.weights:
        given = "for no weights in particular" if bound.weights is None else "for other weights"
        return (f"the schedule was made {given}",)
    return ()


def _check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise EngineError(f"unknown {what} {value!r}, known are {', '.join(known)}")
