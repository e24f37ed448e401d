"""The largest norm of all rows that a generation passes through: shows numbers that left the range of trusted actions.

Rows are kept until there are many, and then measured all at once: at batch 1 that is a few operations for a whole chunk.
Nothing is copied to the host before the end. Knows nothing of schedules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HELD_BYTES = 2**24


class LargestNorm:
    """The largest norm of all rows that were seen. A row of the residual stream keeps whatever a block added to it."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._bytes = 0
        self._found: list[Tensor] = []

    def see(self, value: Any) -> None:
        """(..., d): its rows. Whatever a foreign denoiser may give is taken: tensors with fractions in it count."""
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor) and item.is_floating_point() and item.ndim and item.numel():
                self._held.append(item.detach() if item.requires_grad else item)
                self._bytes += item.nbytes
                if self._bytes > HELD_BYTES:
                    self._measure()

    @torch.no_grad()
    def largest(self) -> Tensor:
        """NaN if one of the numbers was."""
        self._measure()
        return torch.stack(self._found).amax()

    def _measure(self) -> None:
        alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for value in self._held:
            alike.setdefault((value.shape[1:], value.dtype), []).append(value)
        for (_, dtype), held in alike.items():
            wide = torch.promote_types(dtype, torch.float32)  # squares of half precision overflow at 256
            self._found.append(torch.linalg.vector_norm(torch.cat(held), dim=-1, dtype=wide).amax().float())
        self._held, self._bytes = [], 0
