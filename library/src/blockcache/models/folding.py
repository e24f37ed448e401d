"""What the families' folds have in common: exact algebra on weights at build time, in float64. Knows no family."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockcache.models.port import Port
from blockcache.models.program import UnsupportedError

Pair = tuple[Tensor, Tensor]
"""A matrix (inputs, outputs) and its bias: `x @ w + b`."""


def refuse(*reasons: tuple[bool, str]) -> None:
    """Raise UnsupportedError with the first phrase whose condition holds."""
    for unsupported, what in reasons:
        if unsupported:
            raise UnsupportedError(what)


def double(tensor: Tensor, name: str = "") -> Tensor:
    """The numbers in float64, without gradients; `name` is for the error."""
    if not tensor.is_floating_point():
        what = f"{name} is {tensor.dtype}" if name else tensor.dtype
        raise UnsupportedError(f"weights that are no floating point numbers ({what})")
    return tensor.detach().to(torch.float64)


def cast(value: Tensor, like: Tensor) -> Tensor:
    """In the precision and on the device of the policy.

    Args:
        value: what was computed, in float64 as a rule.
        like: one of the policy's own tensors.
    """
    return value.to(dtype=like.dtype, device=like.device).contiguous()


def linear(module: Any) -> Pair:
    """Of an `nn.Linear`."""
    if module.bias is None:
        raise UnsupportedError("a Linear without a bias")
    return double(module.weight).T, double(module.bias)


def after_norm(gain: Tensor, bias: Tensor, pair: Pair) -> Pair:
    """A matrix behind a LayerNorm, with the norm's gain and bias folded into it: the norm is left with neither."""
    w, b = pair
    return gain[:, None] * w, b + bias @ w


def named(pairs: Mapping[str, Pair], index: int | str = "") -> dict[str, Tensor]:
    """As a program's weights: `{name}_w{index}` and `{name}_b{index}`.

    Args:
        pairs: matrices with their biases, by name.
        index: of the layer, where each has such pairs.
    """
    parts = {name: zip("wb", pair, strict=True) for name, pair in pairs.items()}
    return {f"{name}_{part}{index}": tensor for name, pair in parts.items() for part, tensor in pair}


def scaled_queries(qkv: Pair, width: int, heads: int) -> Pair:
    """The projection to queries, keys and values, (width, 3 * width), with the scale of the scores in the queries."""
    w, b = qkv
    scales = torch.ones_like(b)
    scales[:width] /= (width // heads) ** 0.5
    return w * scales, b * scales


def step_times(port: Port, device: torch.device) -> Tensor:
    """The timesteps of all steps, (K,), as the policy's own loop gives them to the denoiser."""
    whole = all(float(t).is_integer() for t in port.timesteps)
    return torch.tensor(port.timesteps, dtype=torch.int64 if whole else torch.float32, device=device)


def signature(settings: tuple[Any, ...], *tensors: Tensor | None) -> str:
    """Of what is in no fingerprint: numbers that a policy makes in code, crops and other settings."""
    digest = hashlib.sha256(repr(settings).encode())
    for tensor in tensors:
        digest.update(b"none" if tensor is None else tensor.double().cpu().numpy().tobytes())
    return digest.hexdigest()
