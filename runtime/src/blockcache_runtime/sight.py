"""What the last frames showed: features that an export gave for moments that come again, so that none is looked at twice.

A moment depends on its frames alone, and is known again by their every number; so the action is the same to the last bit as
if all had been looked at anew. Knows nothing of ONNX Runtime and of policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from blockcache_runtime.arrays import Array

Frames: TypeAlias = Mapping[str, Array]
"""By camera: (moments, batch, channels, height, width)."""


class Sight:
    """The moments of the last call. Several threads may ask at once; each call's are kept as a whole."""

    def __init__(self, features: int) -> None:
        self._size = features
        self._kept: tuple[tuple[dict[str, Array], Array], ...] = ()  # frames of one moment, and what they showed

    def known(self, frames: Frames) -> Array:
        """Features of the first moments, as many in a row as were seen in the last call; (kept, batch, features)."""
        first = next(iter(frames.values()))
        found: list[Array] = []
        kept = self._kept
        for moment in range(len(first)):
            now = {name: array[moment] for name, array in frames.items()}
            showed = next((features for seen, features in kept if _same(seen, now)), None)
            if showed is None:
                break
            found.append(showed)
        return np.stack(found) if found else np.zeros((0, first.shape[1], self._size), dtype=np.float32)

    def keep(self, frames: Frames, features: Array) -> None:
        """Remember a call: its frames, which are copied, and what all of its moments showed, (moments, batch, features)."""
        self._kept = tuple(
            ({name: array[moment].copy() for name, array in frames.items()}, showed)
            for moment, showed in enumerate(features)
        )


def _same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)
