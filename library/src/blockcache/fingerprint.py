"""What a schedule, recording or export was made for, and how that differs from what is at hand. Plain values only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from blockcache.errors import shortened
from blockcache_runtime.fingerprint import Fingerprint

__all__ = ["Fingerprint", "fingerprint_differences"]


def fingerprint_differences(bound: Fingerprint, actual: Fingerprint, ignore: Iterable[str] = ()) -> tuple[str, ...]:
    """One phrase for each field in which two fingerprints differ, where both say something.

    Args:
        bound: What something was made for.
        actual: What is at hand.
        ignore: Names of fields that may differ.
    """
    found = []
    for field in fields(bound):
        expected, got = getattr(bound, field.name), getattr(actual, field.name)
        if field.name not in ignore and expected is not None and got is not None and expected != got:
            found.append(_difference(field.name, expected, got))
    return tuple(found)


def _difference(name: str, bound: Any, got: Any) -> str:
    if name == "weights":
        return f"weights {got[:8]} instead of {bound[:8]}"
    if name == "blocks":
        return _block_difference(bound, got)
    if isinstance(bound, Mapping):
        keys = [key for key in dict.fromkeys((*bound, *got)) if bound.get(key) != got.get(key)]
        names = {key: shortened(str(key), 60) for key in keys}
        return ", ".join(f"{names[key]} {_value(got.get(key))} instead of {_value(bound.get(key))}" for key in keys)
    return f"{name} {_value(got)} instead of {_value(bound)}"


def _block_difference(bound: tuple[str, ...], got: tuple[str, ...]) -> str:
    for sign, names in (("no block", set(bound) - set(got)), ("an extra block", set(got) - set(bound))):
        if names:
            first = min(names)
            return f"{len(got)} blocks instead of {len(bound)} ({sign} {first})"
    return "the same blocks in another order"


def _value(value: Any) -> str:
    return shortened(json.dumps(value, default=str), 200)
