"""Euler's method for flow matching: the denoiser's output is a velocity, times rise from 0 (noise) to 1 (clean).

There is no form of it in diffusers: `FlowMatchEulerDiscreteScheduler` hands the denoiser times that are multiplied by its
number of training steps, and spaces K steps equally only if it was made for K training steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from blockcache.samplers.base import SamplerConfig
from blockcache.samplers.coefficients import Array, SamplerTable, make_table


@dataclass(frozen=True, kw_only=True)
class Euler(SamplerConfig):
    """K equal steps, or `timesteps` that rise and lie from 0 to below 1; the last step ends at 1."""

    type: ClassVar[str] = "euler"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_order(lambda t: 0 <= t < 1, "from 0 to below 1", rising=True)

    def times(self) -> Array:
        if self.timesteps is not None:
            return np.array(self.timesteps, dtype=np.float64)
        return np.arange(self.num_inference_steps) / self.num_inference_steps

    def tabulate(self) -> SamplerTable:
        """x' = x + (t' - t)*v, with v in the place of eps; x0 = x + (1 - t)*v is where v points to."""
        times = self.times()
        stride = np.diff(np.append(times, 1.0))
        columns: dict[str, Array | float] = {"a": 1.0, "e": stride, "eps_out": 1.0, "x0_x": 1.0, "x0_out": 1 - times}
        return make_table(times, [False] * len(times), columns, clip=None)
