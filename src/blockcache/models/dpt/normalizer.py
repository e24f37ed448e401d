"""Linear normalisation of observations and actions: `x * scale + offset`. Knows nothing of models.

Tensor names equal those of the public Diffusion Policy checkpoints (`params_dict.obs.scale`, ...).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
    """The two fields of a low-dimensional policy."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.params_dict = nn.ModuleDict({"obs": LinearField(obs_dim), "action": LinearField(action_dim)})

    @property
    def obs(self) -> LinearField:
        field = self.params_dict["obs"]
        assert isinstance(field, LinearField)
        return field

    @property
    def action(self) -> LinearField:
        field = self.params_dict["action"]
        assert isinstance(field, LinearField)
        return field
