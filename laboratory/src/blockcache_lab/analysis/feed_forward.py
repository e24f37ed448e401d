"""Inside an FFN: errors after each of its parts, its linear response to an input error, and how large its weights are.

All of it needs the parts, which a layer's adapter names where it has an FFN of the form W2 phi(W1 norm(x) + b1) + b2; else
an AnalysisError says so. Knows no family.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.models.adapter import FeedForward
from blockcache.models.port import Port
from blockcache.schedule import Schedule
from blockcache_lab.analysis.residuals import every_step, relative, residuals
from blockcache_lab.analysis.section import AnalysisError
from blockcache_lab.analysis.sections import STAGES, Response, SubLayers, WeightNorms

SCALES = tuple(float(scale) for scale in np.logspace(-2, -5, 7))
"""Sizes of the input error, as shares of the input's."""


def parts_of(port: Port, block: str) -> FeedForward:
    """The modules of an FFN block: norm, first and second linear layer, activation."""
    known = {layer.feed_forward.block: layer.feed_forward for layer in port.adapter.layers if layer.feed_forward}
    if block not in known:
        raise AnalysisError(
            f"The family {port.adapter.family} does not say that {block} has the form W2 phi(W1 norm(x) + b1) + b2, "
            "so nobody can look inside it."
        )
    return known[block]


def sublayer_errors(
    port: Port, schedule: Schedule, block: str, at: Sequence[int], batch: Any, seed: int = 0, *, named: str = "schedule"
) -> SubLayers:
    """Relative errors of an FFN's input and after each of its parts, at some of its update steps under a schedule.

    Args:
        port: The policy.
        schedule: Whose errors these are.
        block: The FFN's name.
        at: Update steps of that block.
        batch: Observations; the errors are means over its samples.
        seed: Of the noise.
        named: What the result calls the schedule.
    """
    parts, updates = parts_of(port, block), schedule.updates[block]
    if odd := [step for step in at if step not in updates]:
        raise AnalysisError(
            f"{block} is not computed at step {odd[0]}; its update steps are {', '.join(map(str, updates))}"
        )
    true = _inputs(port, parts, every_step(port), batch, seed)  # by step, (B, T, d)
    used = _inputs(port, parts, schedule, batch, seed)  # by update
    errors = [
        [
            float(relative(found, expected).mean())
            for found, expected in zip(stages(parts, used[updates.index(step)]), stages(parts, true[step]), strict=True)
        ]
        for step in at
    ]
    return SubLayers(block, named, tuple(at), STAGES, np.array(errors))


@torch.no_grad()
def stages(parts: FeedForward, x: Tensor) -> tuple[Tensor, ...]:
    """An FFN's input and what comes out of the norm, W1, the activation and W2."""
    normed = parts.norm(x)
    hidden = parts.first(normed)
    active = parts.activation(hidden)
    return x, normed, hidden, active, parts.second(active)


def ffn_response(port: Port, block: str, step: int, batch: Any, seed: int = 0) -> Response:
    """The proposition's operator against the true difference, at inputs of a full run, for errors of several sizes.

    In double precision, as the remainder of a small error is the difference of two nearly equal numbers.

    Args:
        port: The policy.
        block: The FFN's name.
        step: Of the full run, whose input at that step is moved.
        batch: Observations; the result is a mean over its samples.
        seed: Of the noise and of the direction in which the input is moved.
    """
    parts = _in_double(parts_of(port, block))
    x = _inputs(port, parts_of(port, block), every_step(port), batch, seed)[step].cpu().double()  # (B, T, d)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    unit = direction * (_norm(x) / _norm(direction))[:, None, None]
    before = stages(parts, x)[-1]
    differences, remainders = [], []
    for scale in SCALES:
        moved = stages(parts, x + scale * unit)[-1] - before
        left = moved - linear_response(parts, x, scale * unit)
        differences.append(float((_norm(moved) / _norm(before)).mean()))
        remainders.append(float((_norm(left) / _norm(before)).mean()))
    return Response(block, step, np.array(SCALES), np.array(differences), np.array(remainders))


def linear_response(parts: FeedForward, x: Tensor, delta: Tensor) -> Tensor:
    """W2 diag(phi'(U)) W1 (A - B) delta, as the proposition has it; U = W1 norm(x) + b1."""
    width = x.shape[-1]
    centred = x - x.mean(dim=-1, keepdim=True)
    sigma = (centred.square().mean(dim=-1, keepdim=True) + parts.norm.eps).sqrt()
    gamma = torch.ones(width, dtype=x.dtype) if parts.norm.weight is None else parts.norm.weight.detach()
    a = gamma * (delta - delta.mean(dim=-1, keepdim=True)) / sigma
    b = gamma * centred * (centred * delta).sum(dim=-1, keepdim=True) / (width * sigma**3)
    with torch.enable_grad():
        u = parts.first(parts.norm(x)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(parts.activation(u).sum(), u)  # phi' acts on each number by itself
    hidden: Tensor = slope * ((a - b) @ parts.first.weight.detach().T)
    return hidden @ parts.second.weight.detach().T


def weight_norms(port: Port) -> WeightNorms:
    """Frobenius norms of W1, W2 and each W_V, for the layers that have them all.

    Args:
        port: The policy.
    """
    kinds = {block.name: block.kind for block in port.adapter.blocks}
    found: dict[str, dict[str, Tensor]] = {}
    for index, layer in enumerate(port.adapter.layers):
        if layer.feed_forward is not None and layer.values:
            values = {f"{kinds[name]} W_V": give() for name, give in layer.values.items()}
            first, second = layer.feed_forward.first.weight, layer.feed_forward.second.weight
            found[f"layers.{index}"] = {"W1": first, "W2": second, **values}
    if not found:
        raise AnalysisError(
            f"The family {port.adapter.family} does not say which weights are W1, W2 and W_V, so they cannot be compared."
        )
    names = list(next(iter(found.values())))
    rows = [[found[layer][name].detach().double().norm().item() for layer in found] for name in names]
    sizes = [[found[layer][name].numel() for layer in found] for name in names]
    return WeightNorms(tuple(found), tuple(names), np.array(rows), np.array(sizes))


def _inputs(port: Port, parts: FeedForward, schedule: Schedule, batch: Any, seed: int) -> list[Tensor]:
    """What an FFN was given each time that it was computed, (B, T, d)."""
    given: list[Tensor] = []
    handle = parts.norm.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0].detach()))
    try:
        residuals(port, schedule, batch, seed, blocks=())
    finally:
        handle.remove()
    return given


def _in_double(parts: FeedForward) -> FeedForward:
    norm, first, second = copy.deepcopy((parts.norm, parts.first, parts.second))
    return FeedForward(parts.block, norm.cpu().double(), first.cpu().double(), parts.activation, second.cpu().double())


def _norm(x: Tensor) -> Tensor:
    size: Tensor = x.flatten(1).norm(dim=1)
    return size
