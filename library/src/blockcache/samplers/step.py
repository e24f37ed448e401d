"""The one step of every sampler, over any arithmetic: numpy here, torch and ONNX nodes elsewhere. Knows no sampler."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np

from blockcache.errors import SamplerError
from blockcache.samplers.coefficients import Array, Coefficient, Coefficients

T = TypeVar("T")


class Arithmetic(Protocol[T]):
    """The two operations of a step, on values of a backend."""

    def mix(self, *terms: tuple[T, Coefficient]) -> T:
        """The sum of values times coefficients; at least one term, none with the float 0.0, and 1.0 where it is 1."""
        ...

    def clip(self, value: T, limit: float) -> T:
        """The value, limited to [-limit, limit]."""
        ...


class NumpyArithmetic:
    """The reference, in float64."""

    def mix(self, *terms: tuple[Array, Coefficient]) -> Array:
        total: Array = sum(coefficient * value for value, coefficient in terms)
        return total

    def clip(self, value: Array, limit: float) -> Array:
        return np.clip(value, -limit, limit)


def step(arithmetic: Arithmetic[T], at: Coefficients, x: T, out: T, x0_prev: T | None, noise: T | None) -> tuple[T, T]:
    """One step of the loop: the next sample, and the clipped x0 to hand to the next step.

    arithmetic: what adds and clips.
    at: the step's coefficients; who has scaled the noise already passes `replace(at, s=1.0)`.
    x, out: the sample, and the denoiser's output for it.
    x0_prev: the x0 of the step before, None at the first.
    noise: what was drawn for this step, None if nothing was.
    """
    x0 = _mix(arithmetic, (x, at.x0_x), (out, at.x0_out))
    if at.clip is not None:
        x0 = arithmetic.clip(x0, at.clip)
    eps = None if _is_zero(at.e) else _mix(arithmetic, (x, at.eps_x), (out, at.eps_out))
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
