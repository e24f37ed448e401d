"""Linear normalisation of observations and actions: `x * scale + offset`. Knows nothing of models.

Tensor names equal those of the public Diffusion Policy checkpoints (`params_dict.obs.scale`, ...).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError


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
