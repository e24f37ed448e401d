"""All that decides what a policy does besides its weights, written down in JSON types: its code and its plain settings.

A rehearsal is remembered under this description, and `staleness` compares settings by it.
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

from blockcache.models.modules import is_altered
from blockcache.models.port import Port

_VERSIONED = ("abc", "builtins", "torch", "typing")  # packages whose code changes with their version only
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class IndescribableError(Exception):
    """Something that cannot be written down: a hook, a closure, an object of an unknown kind."""


def describe_policy(port: Port) -> list[Any]:
    """Code and settings; IndescribableError for a policy that holds something of which nobody can say whether it changed."""
    if is_altered(port.module):
        raise IndescribableError("a hook or a replaced forward")
    parts = {"policy": port.policy, **dict(port.module.named_modules())}
    notes = {(id(part), key) for part, key in port.scratch_attributes}
    kinds = {kind for part in parts.values() for kind in type(part).__mro__ if not _is_versioned(kind)}
    found: list[Any] = [torch.__version__, sorted(map(_file_hash, kinds)), describe_value(port.settings())]
    for name, part in parts.items():
        settings = {
            key: value
            for key, value in vars(part).items()
            if key not in OF_EVERY_MODULE and (id(part), key) not in notes
        }
        settings.pop("noise_scheduler", None)  # holds the state of its last run; the port's settings have what counts
        found.append([name, type(part).__qualname__, describe_value(settings)])
    return found


def describe_value(value: Any) -> Any:
    """A setting; IndescribableError for what is no plain value."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | np.generic):
        return repr(value)
    if isinstance(value, list | tuple):
        return [describe_value(item) for item in value]
    if isinstance(value, Mapping):
        return [[describe_value(key), describe_value(item)] for key, item in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        named = ([item.name, describe_value(getattr(value, item.name))] for item in fields(value))
        return [type(value).__qualname__, *named]
    if isinstance(value, Tensor):
        return describe_value(value.detach().cpu().double().numpy())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, type | FunctionType | BuiltinFunctionType) and getattr(value, "__closure__", None) is None:
        return [value.__qualname__, "" if _is_versioned(value) else _file_hash(value)]
    raise IndescribableError(type(value).__name__)


def _is_versioned(item: Any) -> bool:
    return str(item.__module__).partition(".")[0] in _VERSIONED


def _file_hash(item: Any) -> str:
    """Of the file in which a class or function is written."""
    try:
        return hashlib.sha256(Path(inspect.getfile(item)).read_bytes()).hexdigest()
    except (OSError, TypeError) as error:  # made in a notebook, say
        raise IndescribableError(str(item)) from error
