"""Normalisation of observations and actions, a field for each input and one for the action. Knows nothing of models.

Two kinds, each with the tensor names of the checkpoints that it is read from: `x * scale + offset`, as in the public
Diffusion Policy code, and `(x - shift) * scale + base`. There the shift comes first, as in LeRobot's processors: a number
that never changed in the data has a huge scale, and what is left of it behind the shift is an exact 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockcache.errors import PolicyError

Array: TypeAlias = NDArray[np.float64]
_CONSTANT = 1e6  # scales beyond this are those of numbers that never changed in the data
PREFIX = "of_"  # so that an input may have any name, also one that torch's modules have for something else


class LinearField(nn.Module):
    """One field's scale and offset, and the statistics of the data they came from (kept for the record only)."""

    scale: Tensor
    offset: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("offset", torch.zeros(size))
        self.input_stats = nn.Module()
        for statistic in ("min", "max", "mean", "std"):
            self.input_stats.register_buffer(statistic, torch.zeros(size))

    def normalize(self, value: Tensor) -> Tensor:
        return value * self.scale + self.offset

    def unnormalize(self, value: Tensor) -> Tensor:
        return (value - self.offset) / self.scale

    def affine(self) -> tuple[Array, Array]:
        """Scale and offset, in double precision."""
        return _doubles(self.scale), _doubles(self.offset)

    def fit(self, data: Tensor, tolerance: float = 1e-4) -> None:
        """Map the data's range (per column) to [-1, 1]; a constant column is only centred."""
        low, high = data.amin(dim=0), data.amax(dim=0)
        span = high - low
        constant = span < tolerance
        span = torch.where(constant, torch.full_like(span, 2.0), span)
        self.scale.copy_(2.0 / span)
        self.offset.copy_(torch.where(constant, -low, -1.0 - low * self.scale))
        statistics = {"min": low, "max": high, "mean": data.mean(dim=0), "std": data.std(dim=0)}
        for name, value in statistics.items():
            self.input_stats.get_buffer(name).copy_(value)


class LinearNormalizer(nn.Module):
    """A field for each input and one for the action; `sizes` are their numbers, 1 where one number serves all."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        for name in sizes:
            if hasattr(nn.ModuleDict, name):
                raise PolicyError(f"an input cannot be called {name!r}: torch keeps that name; give it another one")
        self.params_dict = nn.ModuleDict({name: LinearField(size) for name, size in sizes.items()})

    def field(self, name: str) -> LinearField:
        field = self.params_dict[name]
        assert isinstance(field, LinearField)
        return field

    @property
    def obs(self) -> LinearField:
        return self.field("obs")

    @property
    def action(self) -> LinearField:
        return self.field("action")


class ShiftedField(nn.Module):
    """One input's shift, scale and base, or the action's, number by number."""

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

    def affine(self) -> tuple[Array, Array]:
        """Scale and offset of about the same, in double precision; a number that never changed has no range to be measured
        by, and counts as it is."""
        shift, scale, base = map(_doubles, (self.shift, self.scale, self.base))
        scale = np.where(np.abs(scale) > _CONSTANT, 1.0, scale)
        return scale, base - shift * scale

    def fit(self, data: Tensor, tolerance: float = 1e-4) -> None:
        """Map the range of data (N, size), number by number, to [-1, 1]; one that does not change becomes 0."""
        low, high = data.amin(dim=0), data.amax(dim=0)
        changes = high - low >= tolerance
        self.shift.copy_(low)
        self.scale.copy_(torch.where(changes, 2.0 / (high - low), 1.0))
        self.base.copy_(torch.where(changes, -1.0, 0.0))


class ShiftedNormalizer(nn.Module):
    """A field for each input, under its name without dots, and one for the action; `sizes` are their numbers."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        self.inputs = nn.Module()
        for name, size in sizes.items():
            self.inputs.add_module(field_name(name), ShiftedField(size))

    def field(self, name: str) -> ShiftedField:
        found = self.inputs.get_submodule(field_name(name))
        assert isinstance(found, ShiftedField)
        return found

    @property
    def action(self) -> ShiftedField:
        return self.field("action")


def field_name(name: str) -> str:
    """The name of an input's field: torch takes no dots in the name of a module."""
    return PREFIX + name.replace(".", "_")


def _doubles(tensor: Tensor) -> Array:
    return tensor.detach().cpu().double().numpy()
