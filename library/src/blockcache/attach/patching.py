"""The only code that replaces a method. Replacements sit on instances, never on classes, and come off exactly.

They are planned one by one, and then put in place and taken off as a whole: by one call into C, within which Python runs no
signal handler, so that Ctrl-C finds all of them in place or none. Knows nothing of what is cached or of policies.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, NoReturn, TypeAlias, TypeVar

from blockcache.errors import PolicyError

P = TypeVar("P", bound="Patches")
Make: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the replacement of a method from the method."""
locks = {name: threading.Lock() for name in ("changing", "enabling")}
"""Instances may be shared, by policies with one denoiser for two; and a policy is enabled by one thread at a time."""


class Replacement:
    """A callable that stands in an instance's `__dict__` in place of one of its methods."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any], patches: Patches) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.call = call
        self.patches = patches

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise PolicyError("an accelerated policy cannot be copied; call disable() first")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_a_copy()


class Patches:
    """A set of replacements that is applied and comes off as a whole, and while no call is using it; true while applied.

    Applied within a `with`. Any number of threads may be in calls at once; `remove` waits until they have left, and lets
    no call in meanwhile.
    """

    _applied = False

    def __init__(self) -> None:
        self.handle: Any = None
        """What a user removes the patches with; `handle_on` finds it."""
        self._planned: list[tuple[Any, str, Replacement]] = []
        self._inside: dict[object, int] = {}  # calls under way, and the thread of each: a call may lead to another one
        self._renew_locks()
        _all_patches.add(self)

    def _renew_locks(self) -> None:
        self.turn = threading.RLock()
        """For whoever lets only one thread at a time into the policy's own code."""
        self._removing = threading.Lock()

    def __bool__(self) -> bool:
        return self._applied

    def replace(self, instance: Any, name: str, make: Make) -> None:
        """Plan to put `make(original)` in place of `instance.name`."""
        if not hasattr(instance, "__dict__"):
            raise PolicyError(f"{type(instance).__name__} has __slots__: there is no place for a replacement of {name}")
        _refuse_patched(instance, name)
        original = getattr(instance, name)
        replaced = [(name, Replacement(original, make(original), self))]
        # a shallow copy would carry the replacements along, and they would never come off it
        if "__getstate__" not in vars(instance) and not any(instance is known for known, _, _ in self._planned):
            replaced.append(("__getstate__", Replacement(_refuse_a_copy, _refuse_a_copy, self)))
        self._planned += [(instance, *one) for one in replaced]

    def replace_entry(self, instance: Any, name: str, make: Make) -> None:
        """The same for a method that needs all replacements until it returns: `remove` waits for it.

        Who arrives while they come off, or holds the method from before, gets what was there originally.
        """

        def entered(original: Callable[..., Any]) -> Callable[..., Any]:
            replacement = make(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                this = object()
                try:
                    try:
                        self._enter(this)
                        return (replacement if self else original)(*args, **kwargs)
                    finally:
                        self._inside.pop(this, None)
                finally:
                    self._inside.pop(this, None)  # should Ctrl-C have come before the first

            return call

        self.replace(instance, name, entered)

    def wrap(self, instance: Any, name: str, make: Callable[[Callable[..., Any], Callable[..., Any]], Any]) -> None:
        """Put `make(replacement, original)` in place of what is planned for `instance.name`."""
        for known, planned, replacement in self._planned:
            if known is instance and planned == name:
                replacement.call = make(replacement.call, replacement.original)

    def _enter(self, this: object) -> None:
        me = threading.get_ident()
        while True:
            # in this order: whoever removes the patches locks first and then looks who is inside
            self._inside[this] = me
            if not self._removing.locked() or [*self._inside.values()].count(me) > 1:
                return
            del self._inside[this]
            _wait()

    def apply(self) -> None:
        """Put all replacements in place."""
        with locks["changing"]:
            for instance, name, _ in self._planned:
                _refuse_patched(instance, name)
            # straight into __dict__: torch modules intercept setattr, and a method belongs in no registry of theirs
            _at_once(dict.__setitem__, *self._columns())

    def remove(self) -> None:
        """Take all replacements off. Refused, with nothing changed, if something was put on top of one of them."""
        if threading.get_ident() in [*self._inside.values()]:
            raise PolicyError(
                "the acceleration cannot be disabled from within a generation of its policy, which still needs it; "
                "call disable() when predict_action has returned"
            )
        with self._removing:
            while self._inside:
                _wait()
            with locks["changing"]:
                for instance, name, replacement in self._planned if self else ():
                    if vars(instance).get(name) is not replacement:
                        raise PolicyError(
                            f"{type(instance).__name__}.{name} was patched again on top of blockcache; "
                            "remove that patch first"
                        )
                if self:
                    _at_once(dict.pop, *self._columns()[:2], repeat(None))
        for _, _, replacement in self._planned:
            replacement.call = replacement.original
        self._planned, self.handle = [], None  # what was attached is freed at once, not when cycles are collected

    def _columns(self) -> tuple[list[Any], ...]:
        """Where, under which name, what; that it is applied among them."""
        instances, names, replacements = zip(*self._planned, (self, "_applied", True), strict=True)
        return [*map(vars, instances)], [*names], [*replacements]

    def __enter__(self: P) -> P:
        try:
            self.apply()
            return self
        except BaseException:
            self.remove()
            raise

    def __exit__(self, *raised: object) -> None:
        self.remove()


def _at_once(function: Callable[..., Any], *columns: Iterable[Any]) -> None:
    """A function of C for every row, without a line of Python in between."""
    deque(map(function, *columns), maxlen=0)


def _refuse_patched(instance: Any, name: str) -> None:
    if name in vars(instance):
        by = (
            "blockcache, to accelerate or calibrate"
            if isinstance(vars(instance)[name], Replacement)
            else "something else"
        )
        raise PolicyError(
            f"{type(instance).__name__}.{name} is already patched by {by}; remove that patch first, one of "
            "blockcache with disable() (blockcache.handle_of(policy) gives back a handle that was lost)"
        )


def handle_on(instance: Any) -> Any:
    """The handle of what is attached to an instance, whichever of its methods was replaced; None if nothing is.

    Args:
        instance: A policy, its denoiser, or any other object that may have been patched.
    """
    replaced = (item for item in getattr(instance, "__dict__", {}).values() if isinstance(item, Replacement))
    return next((item.patches.handle for item in replaced), None)


def _refuse_a_copy() -> NoReturn:
    raise PolicyError("an accelerated policy cannot be pickled or copied; call disable() first")


def _wait() -> None:
    time.sleep(0.001)


_all_patches: weakref.WeakSet[Patches] = weakref.WeakSet()


def _after_fork() -> None:
    """Only this thread lives on in the child: calls of the others, and locks that they held, are forgotten."""
    locks.update({name: threading.Lock() for name in locks})
    me = threading.get_ident()
    for patches in _all_patches:
        patches._renew_locks()
        patches._inside = {call: thread for call, thread in patches._inside.items() if thread == me}


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
