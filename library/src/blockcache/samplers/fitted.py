"""A sampler of few steps whose constants were fitted to one policy. Written down, not derived; the room `fitting` fits them.

A step is seven numbers: its timestep, the weights that make x0 of sample and output, and those of sample, x0, the x0 before
and noise. They are plain columns of the table, so a fitted sampler costs no more than any other with as many steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from blockcache.errors import SamplerError
from blockcache.samplers.base import SamplerConfig, table
from blockcache.samplers.coefficients import SamplerTable
from blockcache.samplers.diffusion import Diffusion

WEIGHTS = ("x0_x", "x0_out", "a", "b", "c", "s")
"""The columns of the table that are fitted, besides the timesteps."""


@dataclass(frozen=True, kw_only=True)
class Fitted(Diffusion):
    """`timesteps` and one number for each of them in every column; see `coefficients` for what the columns multiply.

    The first step has no x0 before it, so `c` begins with 0. Noise is drawn where `s` is not 0. What else there is says how
    the policy was trained and whether x0 is clipped, so that it can be handed to another sampler again.
    """

    type: ClassVar[str] = "fitted"
    needs_fitting: ClassVar[bool] = True

    x0_x: tuple[float, ...]
    x0_out: tuple[float, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    c: tuple[float, ...]
    s: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("timesteps", self.timesteps is not None, "a list of timesteps")
        for name in WEIGHTS:
            found = getattr(self, name)
            values = found.tolist() if isinstance(found, np.ndarray) else found
            fits = isinstance(values, list | tuple) and len(values) == self.num_inference_steps
            fits = fits and all(type(value) in (int, float) and math.isfinite(value) for value in values)
            self.require(name, fits, f"a list of {self.num_inference_steps} finite numbers, one for each timestep")
            object.__setattr__(self, name, tuple(float(value) for value in values))
        self.require("c", self.c[0] == 0, "0 for the first step, which has no x0 before it")

    @staticmethod
    def of(sampler: SamplerConfig) -> Fitted:
        """The same table, written down; its last step adds no noise.

        Args:
            sampler: One of a diffusion whose steps are made of sample and x0 alone, such as DDPM; DDIM's go along eps.
        """
        made = table(sampler)
        if not isinstance(sampler, Diffusion) or bool(np.any(made.e)):
            raise SamplerError(
                f"a fitted sampler starts from one of a diffusion without a term in eps, such as ddpm; got {sampler.type}"
            )
        columns = {name: getattr(made, name).copy() for name in WEIGHTS}
        columns["s"][-1] = 0.0
        shared = [item.name for item in fields(Diffusion) if item.name not in ("num_inference_steps", "timesteps")]
        settings = {name: getattr(sampler, name) for name in shared}
        return Fitted(**settings, timesteps=tuple(made.timesteps.tolist()), **columns)

    def tabulate(self) -> SamplerTable:
        draws = tuple(weight != 0 for weight in self.s)
        columns = {name: getattr(self, name) for name in WEIGHTS}
        return SamplerTable(timesteps=self.times(), draws=draws, clip=self.clip, **columns)
