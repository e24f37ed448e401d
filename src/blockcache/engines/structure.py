"""Notices that a policy is no longer put together as it was: parts, classes, hooks, functions and plain settings.

Reads no weight and knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Final

from torch import Tensor, nn

from blockcache.attach.patching import Replacement
from blockcache.engines.behaviour import OF_EVERY_MODULE, plain
from blockcache.errors import StaleError, StaleWeightsError

_UNKNOWN: Final = object()  # a value of which we cannot say whether it changed
_ABSENT: Final = object()


class Structure:
    """A policy as it was put together when this was made.

    policy  the policy object
    module  what holds its weights: the policy, or its denoiser where the policy is no module
    """

    def __init__(self, policy: Any, module: nn.Module) -> None:
        root = "policy" if module is policy else "denoiser"
        modules = {f"{root}.{name}" if name else root: part for name, part in module.named_modules()}
        self._parts: dict[str, Any] = {"policy": policy, **modules}
        self._described = dict(self._describe())
        self._remember()

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a part holds, registered or not, once."""
        found = (value for value in self._described.values() if isinstance(value, Tensor))
        return [*{id(tensor): tensor for tensor in found}.values()]

    def check(self) -> None:
        """Cheap enough for every call: that each part holds the very same objects, and only if not, what changed."""
        if not self._holds_the_same():
            self.check_everything()
            self._remember()  # only what does not count was set, such as a setting to the value that it had

    def check_everything(self) -> None:
        """Also what was changed within a list, a mapping or an array that a part holds."""
        now = dict(self._describe())
        for name in {**self._described, **now}:
            was, found = self._described.get(name, _ABSENT), now.get(name, _ABSENT)
            if _is_same(was, found):
                continue
            if isinstance(was, Tensor | nn.Module) or isinstance(found, Tensor | nn.Module):
                raise StaleWeightsError(
                    f"the policy's weights changed after this engine had copied them ({name} is another object); "
                    "disable() and accelerate again"
                )
            raise StaleError(
                f"the policy changed after this engine was made of it ({name} was {_told(was)}, is {_told(found)}); "
                'disable() and accelerate again, or use engine="patched", which reads the policy as it is'
            )

    def _describe(self) -> Iterator[tuple[str, Any]]:
        for name, part in self._parts.items():
            yield f"the class of {name}", type(part)
            for key in _own(part):
                value = vars(part).get(key)
                if not isinstance(value, Replacement):
                    yield f"{name}.{key}", _setting(value)
            if isinstance(part, nn.Module):
                for registry in (part._modules, part._parameters, part._buffers):
                    yield from ((f"{name}.{key}", value) for key, value in [*registry.items()])
                for key in ("_forward_hooks", "_forward_pre_hooks"):
                    # a progress bar of ours counts steps with a hook, and changes nothing
                    hooks = [hook for hook in [*getattr(part, key).values()] if not _is_ours(hook)]
                    yield f"{name}.{key}", hooks

    # -- the quick look: everything in it is compared by identity, most of it without a line of Python

    def _remember(self) -> None:
        modules = [part for part in self._parts.values() if isinstance(part, nn.Module)]
        tables = [
            table
            for part in modules
            for table in (part._modules, part._parameters, part._buffers, part._forward_hooks, part._forward_pre_hooks)
        ]
        self._held = [vars(part) for part in self._parts.values()]
        own = [(vars(part), _own(part)) for part in self._parts.values()]
        self._own = [(held, itemgetter(*keys, keys[0])) for held, keys in own if keys]  # two at least: always a tuple
        self._empty, self._filled = [item for item in tables if not item], [item for item in tables if item]
        self._sizes = [*map(len, self._held)]
        self._objects = self._look()

    def _look(self) -> list[Any]:
        own = chain.from_iterable([read(item) for item, read in self._own])
        registered = chain.from_iterable([item.values() for item in self._filled])
        return [*map(type, self._parts.values()), *own, *registered]

    def _holds_the_same(self) -> bool:
        if any(self._empty) or [*map(len, self._held)] != self._sizes:
            return False
        try:
            objects = self._look()
        except KeyError:  # one setting is gone and another one came
            return False
        return len(objects) == len(self._objects) and all(map(is_, objects, self._objects))


def _own(part: Any) -> list[str]:
    """Names of what an instance holds, without those that torch gives every module."""
    return [name for name in [*vars(part)] if not (isinstance(part, nn.Module) and name in OF_EVERY_MODULE)]


def _setting(value: Any) -> Any:
    """As it is compared: tensors, modules and functions are themselves, plain values are written down."""
    if value is None or isinstance(value, Tensor | nn.Module) or callable(value):
        return value
    try:
        return plain(value)
    except Exception:  # UntellableError, or whatever a foreign value raises
        return _UNKNOWN


def _is_same(was: Any, found: Any) -> bool:
    if was is found or was is _UNKNOWN or found is _UNKNOWN:
        return True
    return not isinstance(was, Tensor | nn.Module) and not isinstance(found, Tensor | nn.Module) and bool(was == found)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("blockcache.")


def _told(value: Any) -> str:
    text = "not there" if value is _ABSENT else value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
