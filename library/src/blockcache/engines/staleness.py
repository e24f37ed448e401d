"""Notices that a policy changed after an engine had copied it: cheaply at every call, and wholly when asked to.

`StaleGuard` is what an engine asks. `Structure` compares how the policy is put together (parts, classes, hooks, functions,
plain settings), `WeightsGuard` its numbers. How the policy acts is compared by `rehearsal`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain, cycle
from operator import is_
from typing import Any, Final, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from blockcache.attach.patching import Replacement
from blockcache.errors import StaleError, StaleWeightsError
from blockcache.models.modules import checksum, memory
from blockcache.models.port import Port

PARTS = 128
"""Every call reads one part in so many of the weights; so after as many calls every byte was read."""
TURNS = 16
"""Every call looks at one share in so many of the structure; so after as many calls everything was looked at."""
_WORDS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I"}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_UNKNOWN: Final = object()  # a value of which nobody can say whether it changed
_ABSENT: Final = object()


class StaleGuard:
    """Remembers a policy as it is now: mode, sampler and sizes, structure, weights."""

    def __init__(self, port: Port) -> None:
        self._port, self._settings = port, port.settings()
        self._structure = Structure(port)
        self._weights = WeightsGuard(self._structure.tensors)

    def check(self) -> None:
        """What every call can afford."""
        self._check_settings()
        self._structure.check()
        self._weights.check()

    def check_everything(self) -> None:
        """Every byte and every setting."""
        self._check_settings()
        self._structure.check_everything()
        self._weights.check_everything()

    def _check_settings(self) -> None:
        self._port.mode.check()
        if self._port.settings() != self._settings:
            raise StaleError(
                "the policy's sampler or sizes changed after this engine was made of it; disable() and accelerate again"
            )


class Structure:
    """A policy as it was put together when this was made.

    Parts that run as they are may change, and so may attributes that are written and never read; what is put on top of the
    policy's entry changes nothing beneath.
    """

    def __init__(self, port: Port) -> None:
        module, root = port.module, "policy" if port.module is port.policy else "denoiser"
        left_out = {id(part) for item in port.parts_outside_program for part in item.modules()}
        self._scratch = {(id(part), key) for part, key in port.scratch_attributes}
        modules = {
            f"{root}.{name}" if name else root: part
            for name, part in module.named_modules()
            if id(part) not in left_out
        }
        self._parts: dict[str, Any] = {"policy": port.policy, **modules}
        self._entry = ("policy", port.entry)
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
                f"the policy changed after this engine was made of it ({name} was {_shown(was)}, is {_shown(found)}); "
                'disable() and accelerate again, or use engine="patched", which reads the policy as it is'
            )

    def _is_idle(self, name: str, key: str) -> bool:
        """Whether an attribute that came later is a mere note: nothing of that name was there to be read."""
        part = self._parts[name]
        return key in vars(part) and not hasattr(type(part), key)

    def _describe(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for name, part in self._parts.items():
            yield (name, "__class__"), type(part)
            for key, value in [*vars(part).items()]:
                of_torch = isinstance(part, nn.Module) and key in _OF_EVERY_MODULE
                left_out = of_torch or (name, key) == self._entry or (id(part), key) in self._scratch
                if not left_out and not isinstance(value, Replacement):
                    yield (name, key), _comparable(value)
            if isinstance(part, nn.Module):
                for registry in _registries(part):
                    yield from (((name, key), value) for key, value in [*registry.items()])
                for key in ("_forward_hooks", "_forward_pre_hooks"):
                    yield (name, key), [*getattr(part, key).values()]

    def _remember(self) -> None:
        parts = [*self._parts.values()]
        modules = [part for part in parts if isinstance(part, nn.Module)]
        registries = [registry for part in modules for registry in _registries(part) if registry]
        self._always = _Values([vars(self._parts["policy"]), *registries])
        tables = [_tables(part) for part in parts]
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


def _tables(part: Any) -> list[dict[Any, Any]]:
    own = [vars(part)]
    if not isinstance(part, nn.Module):
        return own
    return [*own, *_registries(part), part._forward_hooks, part._forward_pre_hooks]


def _comparable(value: Any) -> Any:
    """As it is compared: tensors, modules and functions are themselves, plain values are written down."""
    if value is None or isinstance(value, Tensor | nn.Module) or callable(value):
        return value
    try:
        return _written_down(value)
    except Exception:  # a foreign value may raise anything
        return _UNKNOWN


def _written_down(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | np.generic):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_written_down(item) for item in value]
    if isinstance(value, Mapping):
        return [[_written_down(key), _written_down(item)] for key, item in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value), *([item.name, _written_down(getattr(value, item.name))] for item in fields(value))]
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
    return value if callable(value) else _UNKNOWN


def _is_same(was: Any, found: Any) -> bool:
    if was is found or was is _UNKNOWN or found is _UNKNOWN:
        return True
    return not isinstance(was, Tensor | nn.Module) and not isinstance(found, Tensor | nn.Module) and bool(was == found)


def _shown(value: Any) -> str:
    text = "not there" if value is _ABSENT else value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class WeightsGuard:
    """Tells whether any of these tensors changed. Several threads may ask at once.

    Torch's counters see every edit that torch knows of, `load_state_dict` and optimisers among them. What goes around it
    through `.data` is seen at once if it changes a whole matrix on the CPU, as a switch to EMA weights does, and else when
    its part of the bytes is read.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]  # others have no counter
        self._versions, self._places = self._count(), self._locate()
        bytes_of = [memory(tensor) for tensor in tensors]
        matrices = [pair for pair in zip(tensors, bytes_of, strict=True) if pair[0].ndim > 1]
        self._probes = [_probe(item.element_size(), held) for item, held in matrices if held.is_cpu and len(held)]
        self._values = self._look()
        self._parts = _parts(bytes_of)
        self._sums = [checksum(part) for part in self._parts]
        self._turn = cycle(range(PARTS))
        self._differing: int | None = None

    def check(self) -> None:
        """All counters, a number of each tensor, and the part of the bytes whose turn it is."""
        # in this order: bytes are worth a look only while the tensors are where they were
        if self._count() != self._versions or self._locate() != self._places or self._look() != self._values:
            _complain()
        self._check_part(next(self._turn) if self._differing is None else self._differing)

    def check_everything(self) -> None:
        if self._count() != self._versions or self._locate() != self._places:
            _complain()
        for part in range(PARTS):
            self._check_part(part)

    def _check_part(self, part: int) -> None:
        if checksum(self._parts[part]) != self._sums[part]:
            self._differing = part  # looked at again by the next call, which must not find another part in order
            _complain()
        self._differing = None

    def _count(self) -> list[int]:
        return [tensor._version for tensor in self._counted]

    def _locate(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._tensors)]

    def _look(self) -> list[int]:
        return [words[index] for words, index in self._probes]


def _probe(size: int, held: Tensor) -> tuple[memoryview, int]:
    """A tensor's memory as whole numbers, so that NaN equals itself, and the place of one that is no corner."""
    words = held.numpy().data.cast(_WORDS.get(size, "Q"))
    return words, int(0.618 * len(words))


def _parts(pieces: list[Tensor]) -> list[list[Tensor | memoryview]]:
    """All the bytes in `PARTS` parts of one size; a part may begin and end within a tensor, and the last may be short."""
    size = -(-sum(map(len, pieces)) // PARTS)
    parts: list[list[Tensor | memoryview]] = [[] for _ in range(PARTS)]
    place = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            number, taken = divmod(place + start, size)
            stop = start + size - taken
            share = piece[start:stop]
            parts[number].append(share.numpy().data if share.is_cpu else share)  # others are fetched in their turn
            start = stop
        place += len(piece)
    return parts


def _complain() -> NoReturn:
    raise StaleWeightsError(
        "the policy's weights changed after this engine had copied them; disable() and accelerate again"
    )
