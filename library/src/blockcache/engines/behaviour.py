"""All that decides what a policy does besides its weights, written down: its code and its plain settings.

What was found out about a policy is remembered under this. Knows nothing of what that is.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blockcache.models.port import Port, is_altered

_KNOWN = ("abc", "builtins", "torch", "typing")  # packages whose code changes with their version only
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class UntellableError(Exception):
    """Something that cannot be written down: a hook, a closure, an object of an unknown kind."""


def describe(port: Port) -> list[Any]:
    """In JSON types; UntellableError for a policy that holds something of which we cannot say whether it changed."""
    if is_altered(port.module):
        raise UntellableError("a hook or a replaced forward")
    parts = {"policy": port.policy, **dict(port.module.named_modules())}
    notes = {(id(part), key) for part, key in port.scratch_attributes}
    kinds = {kind for part in parts.values() for kind in type(part).__mro__ if not _is_known(kind)}
    found: list[Any] = [torch.__version__, sorted(map(_code, kinds)), plain(port.settings())]
    for name, part in parts.items():
        settings = {
            key: value
            for key, value in vars(part).items()
            if key not in OF_EVERY_MODULE and (id(part), key) not in notes
        }
        settings.pop("noise_scheduler", None)  # holds the state of its last run; the port's settings have what counts
        found.append([name, type(part).__qualname__, plain(settings)])
    return found


def plain(value: Any) -> Any:
    """A setting in JSON types; UntellableError for what is none."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return [[plain(key), plain(item)] for key, item in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, *([item.name, plain(getattr(value, item.name))] for item in fields(value))]
    if isinstance(value, torch.dtype | torch.device | np.generic):
        return repr(value)
    if isinstance(value, Tensor):
        return plain(value.detach().cpu().double().numpy())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, type | FunctionType | BuiltinFunctionType) and getattr(value, "__closure__", None) is None:
        return [value.__qualname__, "" if _is_known(value) else _code(value)]
    raise UntellableError(type(value).__name__)


def _is_known(item: Any) -> bool:
    return str(item.__module__).partition(".")[0] in _KNOWN


def _code(item: Any) -> str:
    """The file in which a class or function is written."""
    try:
        return hashlib.sha256(Path(inspect.getfile(item)).read_bytes()).hexdigest()
    except (OSError, TypeError) as error:  # made in a notebook, say
        raise UntellableError(str(item)) from error
