"""The only code that replaces a method. Replacements sit on instances, never on classes, and come off exactly.

Knows nothing of what is cached or of policies.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

from blockcache.errors import PolicyError

Make: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the replacement of a method from the method."""
_changing = threading.Lock()  # instances may be shared, by policies with one denoiser for two


class Replacement:
    """A callable that stands in an instance's `__dict__` in place of one of its methods."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any], patches: Patches) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.patches = patches
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise PolicyError("an accelerated policy cannot be copied; call disable() first")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_a_copy()


class Patches:
    """A set of replacements that comes off as a whole, in reverse order, and while no call is using them."""

    def __init__(self) -> None:
        self.handle: Any = None
        """What a user removes the patches with; `handle_on` finds it."""
        self._applied: list[tuple[Any, str, Replacement]] = []
        self._gate = _CallGate()

    def __bool__(self) -> bool:
        return bool(self._applied)

    def replace(self, instance: Any, name: str, make: Make) -> None:
        """Put `make(original)` in place of `instance.name`."""
        if not hasattr(instance, "__dict__"):
            raise PolicyError(f"{type(instance).__name__} has __slots__: there is no place for a replacement of {name}")
        with _changing:
            if name in vars(instance):
                is_replacement = isinstance(vars(instance)[name], Replacement)
                by = "blockcache, to accelerate or calibrate" if is_replacement else "something else"
                raise PolicyError(
                    f"{type(instance).__name__}.{name} is already patched by {by}; remove that patch first, ours with "
                    "disable() (blockcache.handle_of(policy) gives back a handle that was lost)"
                )
            original = getattr(instance, name)
            self._apply(instance, name, Replacement(original, make(original), self))
            # a shallow copy would carry the replacements along, and they would never come off it
            if "__getstate__" not in vars(instance):
                self._apply(instance, "__getstate__", Replacement(_refuse_a_copy, _refuse_a_copy, self))

    def replace_entry(self, instance: Any, name: str, make: Make) -> None:
        """The same for a method that needs all replacements until it returns: `remove` waits for it.

        Who arrives while they come off, or holds the method from before, gets what was there originally.
        """

        def entered(original: Callable[..., Any]) -> Callable[..., Any]:
            replacement = make(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                with self._gate.inside():
                    return (replacement if self else original)(*args, **kwargs)

            return call

        self.replace(instance, name, entered)

    def remove(self) -> None:
        """Take all replacements off. Refused, with nothing changed, if something was put on top of one of them."""
        with self._gate.paused(), _changing:
            for instance, name, replacement in self._applied:
                if vars(instance).get(name) is not replacement:
                    raise PolicyError(
                        f"{type(instance).__name__}.{name} was patched again on top of blockcache; remove that patch first"
                    )
            while self._applied:
                instance, name, _ = self._applied.pop()
                del vars(instance)[name]

    def _apply(self, instance: Any, name: str, replacement: Replacement) -> None:
        # straight into __dict__: torch modules intercept setattr, and a method belongs in no registry of theirs
        vars(instance)[name] = replacement
        self._applied.append((instance, name, replacement))


def handle_on(instance: Any) -> Any:
    """The handle of what is attached to an instance, whichever of its methods was replaced; None if nothing is."""
    replaced = (item for item in getattr(instance, "__dict__", {}).values() if isinstance(item, Replacement))
    return next((item.patches.handle for item in replaced), None)


def _refuse_a_copy() -> NoReturn:
    raise PolicyError("an accelerated policy cannot be pickled or copied; call disable() first")


class _CallGate:
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
