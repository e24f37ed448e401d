"""A whole denoising loop as one frozen table of coefficients. Knows nothing of how a sampler arrives at them.

Every step of every sampler is the same line of arithmetic,

    x' = a*x + b*x0 + e*eps + c*x0_prev + s*noise

with `x0` the predicted clean sample after clipping, `eps` the noise as predicted (before clipping; Euler has the
velocity in its place) and `x0_prev` the clipped `x0` of the step before. An engine unrolls the loop with constants; `step`
is that line over any arithmetic: numpy, torch or ONNX nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from blockcache.errors import SamplerError

T = TypeVar("T")
Array: TypeAlias = npt.NDArray[np.float64]
Coefficient: TypeAlias = Any  # a float, or a value of the backend, such as a row that comes into an ONNX Scan


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """One step: `x0 = x0_x*x + x0_out*out`, `eps = eps_x*x + eps_out*out`, then the sum in the module's docstring.

    Floats when they come from a table. x0 is clipped to [-clip, clip] unless clip is None.
    """

    a: Coefficient = 0.0
    b: Coefficient = 0.0
    e: Coefficient = 0.0
    c: Coefficient = 0.0
    s: Coefficient = 0.0
    x0_x: Coefficient = 0.0
    x0_out: Coefficient = 0.0
    eps_x: Coefficient = 0.0
    eps_out: Coefficient = 0.0
    clip: float | None

    def eps_of_clean(self) -> tuple[Coefficient, Coefficient]:
        """(f, g) of the eps that leads from a sample x to a clean one x0, f*x + g*x0."""
        toward = self.eps_out / self.x0_out
        return self.eps_x - toward * self.x0_x, toward


COLUMNS = tuple(item.name for item in fields(Coefficients) if item.name != "clip")


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerTable(Coefficients):
    """The coefficients of K steps in execution order: every column is a read-only array (K,); a number stands for all steps.

    `draws` says which steps take noise from the generator. That is not the same as `s != 0`: DDIM with eta > 0 and
    SDE-DPM-Solver++ draw at their last step too, where s is 0.
    """

    timesteps: Array
    draws: tuple[bool, ...]

    def __post_init__(self) -> None:
        for name in ("timesteps", *COLUMNS):
            column = np.zeros(len(self.timesteps)) + getattr(self, name)
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    @property
    def steps(self) -> int:
        """How often the denoiser is called, K."""
        return len(self.timesteps)

    @property
    def draw_count(self) -> int:
        """How many noises the steps draw, the initial one not counted."""
        return sum(self.draws)

    def at(self, k: int) -> Coefficients:
        """The coefficients of step k as Python floats."""
        return self._rows[k]

    @cached_property
    def _rows(self) -> tuple[Coefficients, ...]:
        rows = zip(*(getattr(self, name).tolist() for name in COLUMNS), strict=True)
        return tuple(Coefficients(**dict(zip(COLUMNS, row, strict=True)), clip=self.clip) for row in rows)


class Arithmetic(Protocol[T]):
    """The operations of a step, on values of a backend."""

    def mix(self, *terms: tuple[T, Coefficient]) -> T:
        """The sum of values times coefficients; at least one term, none with the float 0.0, and 1.0 where it is 1."""
        ...

    def clip(self, value: T, limit: float) -> T:
        """The value, limited to [-limit, limit]."""
        ...

    def mul(self, a: T, b: T) -> T:
        """The product of two values, one of which may have 1 for the size of its last axis."""
        ...


@dataclass(frozen=True, eq=False)
class Guide(Generic[T]):
    """What a new chunk is told of the one before it, token by token; see `step`.

    Args:
        pull: How much of the clean sample is taken from the old chunk, 0 to 1, (..., tokens, 1).
        keep: 1 - pull.
        aim: The old chunk, normalised, times `pull`, (..., tokens, D).
    """

    pull: T
    keep: T
    aim: T


def step(
    arithmetic: Arithmetic[T],
    at: Coefficients,
    x: T,
    out: T,
    x0_prev: T | None,
    noise: T | None,
    guide: Guide[T] | None = None,
) -> tuple[T, T]:
    """One step of the loop: the next sample, and the clipped x0 to hand to the next step.

    With a guide (real-time chunking) the predicted clean chunk is blended with the one before, x0 + pull * (old - x0), and
    eps with the one that leads there: where pull is 1, the generation ends at the old chunk.

    Args:
        arithmetic: What adds and clips.
        at: The step's coefficients; for noise that is scaled already, `replace(at, s=1.0)`.
        x: The sample.
        out: The denoiser's output for it.
        x0_prev: The x0 of the step before, None at the first.
        noise: What was drawn for this step, None if nothing was.
        guide: The chunk before, if the new one is told of it.
    """
    x0 = _mix(arithmetic, (x, at.x0_x), (out, at.x0_out))
    if at.clip is not None:
        x0 = arithmetic.clip(x0, at.clip)
    eps = None if _is_zero(at.e) else _mix(arithmetic, (x, at.eps_x), (out, at.eps_out))
    if guide is not None:
        x0 = arithmetic.mix((arithmetic.mul(x0, guide.keep), 1.0), (guide.aim, 1.0))
        if eps is not None:
            of_sample, of_clean = at.eps_of_clean()
            eps = arithmetic.mix(
                (arithmetic.mul(eps, guide.keep), 1.0),
                (arithmetic.mul(x, guide.pull), of_sample),
                (guide.aim, of_clean),
            )
    terms = {"x": (x, at.a), "x0": (x0, at.b), "eps": (eps, at.e), "x0_prev": (x0_prev, at.c), "noise": (noise, at.s)}
    needed: list[tuple[T, Coefficient]] = []
    for name, (value, coefficient) in terms.items():
        if _is_zero(coefficient):
            continue
        if value is None:
            raise SamplerError(f"a step with {name} in its sum: expected {name}; got None")
        needed.append((value, coefficient))
    return _mix(arithmetic, *needed), x0


def _mix(arithmetic: Arithmetic[T], *terms: tuple[T, Coefficient]) -> T:
    return arithmetic.mix(*(term for term in terms if not _is_zero(term[1])))


def _is_zero(coefficient: Coefficient) -> bool:
    return isinstance(coefficient, float) and coefficient == 0.0
