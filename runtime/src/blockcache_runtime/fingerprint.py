"""What a schedule, recording or export was made for, and how that differs from what is at hand. Plain values only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from blockcache_runtime.errors import shortened
from blockcache_runtime.files.fields import Fields, Names, Steps, read


@dataclass(frozen=True)
class Fingerprint:
    """A field that is None binds nothing: the printed schedules bind family, blocks and steps only."""

    family: str | None = None
    blocks: tuple[str, ...] | None = None
    widths: Mapping[str, int] | None = None
    steps: int | None = None
    sampler: Mapping[str, Any] | None = None
    weights: str | None = None

    def differences(self, actual: Fingerprint, ignore: Iterable[str] = ()) -> tuple[str, ...]:
        """One phrase for each bound field in which `actual` differs."""
        found = []
        for field in fields(self):
            bound, got = getattr(self, field.name), getattr(actual, field.name)
            if field.name in ignore or bound is None or got is None or bound == got:
                continue
            found.append(_difference(field.name, bound, got))
        return tuple(found)

    def with_weights(self, weights: str | None) -> Fingerprint:
        return replace(self, weights=weights)

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "blocks": None if self.blocks is None else list(self.blocks),
            "widths": None if self.widths is None else dict(self.widths),
            "steps": self.steps,
            "sampler": None if self.sampler is None else dict(self.sampler),
            "weights": self.weights,
        }

    @classmethod
    def from_dict(cls, value: Any) -> Fingerprint:
        """Strict: exactly the known keys, each of its type or null; otherwise a ContentError."""
        return cls(**read(_FIELDS, value, "fingerprint"))


_FIELDS = Fields(
    {
        "family": str | None,
        "blocks": Names | None,
        "widths": dict[str, int] | None,
        "steps": Steps | None,
        "sampler": dict | None,
        "weights": str | None,
    }
)


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
