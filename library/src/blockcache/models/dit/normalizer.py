"""Normalisation of observations and actions: `(x - shift) * scale + base`. Knows nothing of models.

The shift comes first, as in LeRobot's processors: a value that never changed in the data has a huge scale there, and what is
left of it behind the shift is an exact 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockcache.models.dit.config import module_name

PREFIX = "of_"  # so that an input may have any name, also one that torch's modules have for something else


class Field(nn.Module):
    """One input's, or the action's, number by number."""

    shift: Tensor
    scale: Tensor
    base: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("base", torch.zeros(size))

    def normalize(self, value: Tensor, axis: int = -1) -> Tensor:
        """`axis` is that of the numbers: of frames it is the channels'."""
        shape = [-1, *([1] * (-1 - axis))]
        shift, scale, base = (part.view(shape) for part in (self.shift, self.scale, self.base))
        return (value - shift) * scale + base

    def unnormalize(self, value: Tensor) -> Tensor:
        return (value - self.base) / self.scale + self.shift

    def fit(self, data: Tensor, tolerance: float = 1e-4) -> None:
        """Map the range of data (N, size), number by number, to [-1, 1]; one that does not change becomes 0."""
        low, high = data.amin(dim=0), data.amax(dim=0)
        changes = high - low >= tolerance
        self.shift.copy_(low)
        self.scale.copy_(torch.where(changes, 2.0 / (high - low), 1.0))
        self.base.copy_(torch.where(changes, -1.0, 0.0))


class Normalizer(nn.Module):
    """A field for each input, under its name without dots, and one for the action; `sizes` are their numbers."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.inputs = nn.Module()
        for name, size in sizes.items():
            self.inputs.add_module(f"{PREFIX}{module_name(name)}", Field(size))

    def field(self, name: str) -> Field:
        found = self.inputs.get_submodule(f"{PREFIX}{module_name(name)}")
        assert isinstance(found, Field)
        return found

    @property
    def action(self) -> Field:
        return self.field("action")
