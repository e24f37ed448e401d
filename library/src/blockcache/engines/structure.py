"""Notices that a policy is no longer put together as it was: parts, classes, hooks, functions and plain settings.

Reads no weight and knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle
from operator import is_
from typing import Any, Final

from torch import Tensor, nn

from blockcache.attach.patching import Replacement
from blockcache.engines.behaviour import OF_EVERY_MODULE, plain
from blockcache.errors import StaleError, StaleWeightsError

TURNS = 16
"""Every call looks at one share of this many; so after as many calls everything was looked at."""
_UNKNOWN: Final = object()  # a value of which we cannot say whether it changed
_ABSENT: Final = object()


class Structure:
    """A policy as it was put together when this was made.

    policy  the policy object
    module  what holds its weights: the policy, or its denoiser where the policy is no module
    entry   the policy's method that an engine replaces: what is put on top of it changes nothing beneath
    live    parts that run as they are, which may change
    notes   attributes of parts that are written and never read
    """

    def __init__(
        self,
        policy: Any,
        module: nn.Module,
        entry: str,
        live: Iterable[nn.Module] = (),
        notes: Iterable[tuple[nn.Module, str]] = (),
    ) -> None:
        root = "policy" if module is policy else "denoiser"
        left_out = {id(part) for item in live for part in item.modules()}
        self._notes = {(id(part), key) for part, key in notes}
        modules = {
            f"{root}.{name}" if name else root: part
            for name, part in module.named_modules()
            if id(part) not in left_out
        }
        self._parts: dict[str, Any] = {"policy": policy, **modules}
        self._entry = ("policy", entry)
        self._described = dict(self._describe())
        self._suspect, self._turn = False, cycle(range(TURNS))
        self._remember()

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a part holds, registered or not, once."""
        found = (value for value in self._described.values() if isinstance(value, Tensor))
        return [*{id(tensor): tensor for tensor in found}.values()]

    def check(self) -> None:
        """What every call can afford: the policy's own settings, all registered parts, and a share of all else."""
        if self._suspect or not (self._always.are_the_same() and self._in_turn[next(self._turn)].are_the_same()):
            self._suspect = True  # until all is found in order: the next call must not look at another share only
            self.check_everything()
            self._remember()  # only what does not count was set, such as a setting to the value that it had
            self._suspect = False

    def check_everything(self) -> None:
        """Also classes, and what was changed within a list, a mapping or an array that a part holds."""
        now = dict(self._describe())
        for place in {**self._described, **now}:
            was, found = self._described.get(place, _ABSENT), now.get(place, _ABSENT)
            if _is_same(was, found) or (was is _ABSENT and self._is_idle(*place)):
                continue
            name = ".".join(place)
            if isinstance(was, Tensor | nn.Module) or isinstance(found, Tensor | nn.Module):
                raise StaleWeightsError(
                    f"the policy's weights changed after this engine had copied them ({name} is another object); "
                    "disable() and accelerate again"
                )
            raise StaleError(
                f"the policy changed after this engine was made of it ({name} was {_told(was)}, is {_told(found)}); "
                'disable() and accelerate again, or use engine="patched", which reads the policy as it is'
            )

    def _is_idle(self, name: str, key: str) -> bool:
        """Whether an attribute that came later is a mere note: nothing of that name was there to be read."""
        part = self._parts[name]
        return key in vars(part) and not hasattr(type(part), key)

    def _describe(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for name, part in self._parts.items():
            yield (name, "__class__"), type(part)
            for key in _own(part):
                value = vars(part).get(key)
                noted = (id(part), key) in self._notes
                if not isinstance(value, Replacement) and (name, key) != self._entry and not noted:
                    yield (name, key), _setting(value)
            if isinstance(part, nn.Module):
                for registry in _registries(part):
                    yield from (((name, key), value) for key, value in [*registry.items()])
                for key in ("_forward_hooks", "_forward_pre_hooks"):
                    # a progress bar of ours counts steps with a hook, and changes nothing
                    hooks = [hook for hook in [*getattr(part, key).values()] if not _is_ours(hook)]
                    yield (name, key), hooks

    def _remember(self) -> None:
        parts = [*self._parts.values()]
        modules = [part for part in parts if isinstance(part, nn.Module)]
        registries = [registry for part in modules for registry in _registries(part) if registry]
        self._always = _Values([vars(self._parts["policy"]), *registries])
        tables = [[vars(part), *(_tables(part) if isinstance(part, nn.Module) else ())] for part in parts]
        self._in_turn = [_Values([*chain.from_iterable(tables[turn::TURNS])]) for turn in range(TURNS)]


class _Values:
    """What some dictionaries hold: whether it is the very same objects is found out without a line of Python for each."""

    def __init__(self, held: list[dict[str, Any]]) -> None:
        self._held = held
        self._values = self._read()

    def _read(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._held))]

    def are_the_same(self) -> bool:
        now = self._read()
        return len(now) == len(self._values) and all(map(is_, now, self._values))


def _registries(module: nn.Module) -> list[dict[str, Any]]:
    return [module._modules, module._parameters, module._buffers]


def _tables(module: nn.Module) -> list[dict[Any, Any]]:
    return [*_registries(module), module._forward_hooks, module._forward_pre_hooks]


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
