"""The only code that replaces a method. Replacements sit on instances, never on classes, and come off exactly.

Knows nothing of what is cached or of policies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from blockcache.errors import PolicyError


class Replacement:
    """A callable that stands in an instance's `__dict__` in place of one of its methods."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise PolicyError("an accelerated policy cannot be copied; call disable() first")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PolicyError("an accelerated policy cannot be pickled or copied; call disable() first")


class Patches:
    """A set of replacements that goes on as a whole or not at all, and comes off in reverse order."""

    def __init__(self) -> None:
        self._applied: list[tuple[Any, str, Replacement]] = []

    def replace(self, instance: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `make(original)` in place of `instance.name`."""
        if not hasattr(instance, "__dict__"):
            raise PolicyError(f"{type(instance).__name__} has __slots__: there is no place for a replacement of {name}")
        if name in vars(instance):
            raise PolicyError(
                f"{type(instance).__name__}.{name} is already patched"
                + (", this policy is accelerated" if is_ours(instance, name) else " by something else")
                + "; call disable() or remove that patch first"
            )
        original = getattr(instance, name)
        replacement = Replacement(original, make(original))
        # straight into __dict__: torch modules intercept setattr, and a method belongs in no registry of theirs
        vars(instance)[name] = replacement
        self._applied.append((instance, name, replacement))

    def remove(self) -> None:
        """Take all replacements off. Refused, with nothing changed, if something was put on top of one of them."""
        for instance, name, replacement in self._applied:
            if vars(instance).get(name) is not replacement:
                raise PolicyError(
                    f"{type(instance).__name__}.{name} was patched again on top of blockcache; remove that patch first"
                )
        while self._applied:
            instance, name, _ = self._applied.pop()
            del vars(instance)[name]


def is_ours(instance: Any, name: str) -> bool:
    return isinstance(getattr(instance, "__dict__", {}).get(name), Replacement)
