"""What a schedule, recording or export was made for. Plain values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from blockcache_runtime.fields import Fields, Names, Steps, read


@dataclass(frozen=True)
class Fingerprint:
    """A field that is None binds nothing: the printed schedules bind family, blocks and steps only."""

    family: str | None = None
    blocks: Names | None = None
    widths: Mapping[str, int] | None = None
    steps: Steps | None = None
    sampler: Mapping[str, Any] | None = None
    weights: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """In JSON's own types."""
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
        """Strict: exactly the known keys, each of its type or null; otherwise a ContentError.

        Args:
            value: As `to_dict` gives it.
        """
        return cls(**read(_FIELDS, value, "fingerprint"))


_FIELDS = Fields(get_type_hints(Fingerprint, include_extras=True))
