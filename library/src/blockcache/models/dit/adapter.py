"""adaLN DiT denoisers: this package's, and any foreign object of that shape, LeRobot's for one.

`transformer_blocks[i]` with `norm1`, `attn` (rotary) or `multihead_attn`, `norm2`, `mlp` and `adaLN_modulation`. What is
cached is a block's output before its gate; the gate of the present step is applied to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError
from blockcache.models.adapter import Adapter, Layer, Route, check_unpatched, names_by_layer
from blockcache.models.dit.denoiser import CHUNKS, DiTShape, attention_of, computed, run_layer
from blockcache.models.dit.policy import FAMILY
from blockcache.models.dit.program import fold

PARTS = ("time_mlp", "input_proj", "output_proj", "transformer_blocks")
_OF_A_LAYER = ("norm1", "norm2", "mlp", "adaLN_modulation")
_AGREES = 1e-4  # of a foreign layer's own forward, relative to the largest number


def find(denoiser: nn.Module, tokens: int) -> Adapter | str:
    """An adapter if the denoiser has the shape of an adaLN DiT, else what it lacks; a PolicyError if it cannot be used as it
    is. `tokens` is the policy's horizon."""
    if missing := [name for name in PARTS if not hasattr(denoiser, name)]:
        return f"has no {', '.join(missing)}"
    layers: list[Any] = list(denoiser.transformer_blocks)  # type: ignore[arg-type]
    if not layers:
        return "has no transformer_blocks"
    for index, layer in enumerate(layers):
        if lacks := _lacks(layer):
            return f"has {lacks} in transformer_blocks.{index}"
        _check(index, layer)
    shape = _shape(denoiser, layers, tokens)
    return Adapter(
        family=FAMILY,
        denoiser=denoiser,
        blocks=shape.blocks,
        layers=tuple(map(_layer, layers, names_by_layer(shape.blocks, len(layers)))),
        widths={
            "width": shape.width,
            "heads": int(attention_of(layers[0]).num_heads),
            "hidden": shape.hidden,
            "tokens": tokens,
            "cond_dim": shape.cond_dim,
            "input_dim": shape.action_dim,
        },
        every_step=shape.every_step,
        fold=partial(fold, shape=shape),
    )


def _lacks(layer: Any) -> str:
    """What a layer misses to be one of an adaLN DiT, in words; "" if nothing."""
    if missing := [name for name in _OF_A_LAYER if not isinstance(getattr(layer, name, None), nn.Module)]:
        return f"no {', '.join(missing)}"
    attention = attention_of(layer)
    if isinstance(attention, nn.MultiheadAttention):
        if not attention.batch_first:
            return "attention that is not batch_first"
    elif any(not hasattr(attention, name) for name in ("qkv_proj", "out_proj", "rope")):
        return "no attn with qkv_proj, out_proj and rope, and no multihead_attn"
    last = list(layer.adaLN_modulation.children())[-1:]
    width = layer.norm1.normalized_shape[-1] if isinstance(layer.norm1, nn.LayerNorm) else 0
    if not last or getattr(last[0], "out_features", None) != CHUNKS * width:
        return f"no adaLN_modulation that ends in {CHUNKS} x the width of norm1"
    return ""


def _check(index: int, layer: Any) -> None:
    """Refuse a layer whose forward is not the one that the adapter expresses block by block."""
    where = f"transformer_blocks.{index}"
    check_unpatched(layer, where)
    if type(layer).__module__.startswith("blockcache.") or any(part.training for part in layer.modules()):
        return  # this package's own; or the policy is about to be refused for its mode
    last = list(layer.adaLN_modulation.children())[-1]
    like = last.weight
    # no random numbers: torch's generator stays as it is
    stream = torch.sin(torch.arange(2.0 * layer.norm1.normalized_shape[-1])).view(1, 2, -1).to(like)
    features = torch.cos(torch.arange(float(last.in_features))).view(1, -1).to(like)
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        try:
            found, own = run_layer(layer, computed, stream, features), layer(stream, features)
            gap, largest = (found - own).abs().max(), own.abs().max().clamp(min=1.0)
            agrees = not bool(own.isfinite().all()) or bool(
                gap <= _AGREES * largest
            )  # such weights are refused elsewhere
        except Exception:  # foreign code may raise anything
            agrees = False
    if not agrees:
        raise PolicyError(
            f"{where} is a {type(layer).__name__} whose forward is not x + gate * f(norm(x) * (1 + scale) + shift), "
            "attention first and the MLP behind it (post-norm, or another order): its blocks cannot be cached"
        )


def _shape(denoiser: Any, layers: list[Any], tokens: int) -> DiTShape:
    """Sizes read off the modules; what is unknown of a foreign denoiser is 0."""
    width, last = layers[0].norm1.normalized_shape[-1], list(layers[0].adaLN_modulation.children())[-1]
    time, hidden = (
        [part.out_features for part in mlp.modules() if isinstance(part, nn.Linear)] or [0]
        for mlp in (denoiser.time_mlp, layers[0].mlp)
    )
    return DiTShape(
        width=width,
        layers=len(layers),
        tokens=tokens,
        cond_dim=last.in_features - time[-1],
        time_dim=time[-1],
        action_dim=denoiser.input_proj.in_features,
        hidden=hidden[0],
    )


def _layer(layer: Any, names: tuple[str, ...]) -> Layer:
    def forward(route: Route, x: Tensor, features: Tensor) -> Tensor:
        return run_layer(layer, lambda place, compute: route(names[place], compute), x, features)

    return Layer(layer, names, forward, layer.norm1, "x")
