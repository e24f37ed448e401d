"""adaLN DiT denoisers: this package's, and any foreign object of that shape, LeRobot's for one.

`transformer_blocks[i]` with `norm1`, `attn` (rotary) or `multihead_attn`, `norm2`, `mlp` and `adaLN_modulation`. What is
cached is a block's output before its gate; the gate of the present step is applied to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError
from blockcache.models.adapter import Adapter, Layer, Route
from blockcache.models.dit.flops import CHUNKS, DiTShape
from blockcache.models.dit.fold import attention_of, fold
from blockcache.models.dit.policy import FAMILY

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
    shape, widths = _sizes(denoiser, layers[0], len(layers), tokens)
    names = [block.name for block in shape.blocks]
    pairs = [(names[2 * index], names[2 * index + 1]) for index in range(len(layers))]
    return Adapter(
        family=FAMILY,
        denoiser=denoiser,
        blocks=shape.blocks,
        layers=tuple(_layer(layer, *pair) for layer, pair in zip(layers, pairs, strict=True)),
        widths=widths,
        every_step=shape.every_step,
        timestep=_timestep,
        fold=fold,
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
    """Refuse a layer whose forward is not the one that we express block by block."""
    where = f"transformer_blocks.{index}"
    for name, module in layer.named_modules():
        if "forward" in vars(module):
            place = f"{where}.{name}" if name else where
            raise PolicyError(
                f"{place}.forward is already patched by something else; remove that patch first (an acceleration with "
                "disable(); blockcache.handle_of(policy) gives back a handle that was lost)"
            )
    if type(layer).__module__.startswith("blockcache.") or any(part.training for part in layer.modules()):
        return  # this package's own; or the policy is about to be refused for its mode
    last = list(layer.adaLN_modulation.children())[-1]
    like = last.weight
    # no random numbers: nobody else's are drawn away
    stream = torch.sin(torch.arange(2.0 * layer.norm1.normalized_shape[-1])).view(1, 2, -1).to(like)
    features = torch.cos(torch.arange(float(last.in_features))).view(1, -1).to(like)
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        try:
            found, own = _layer(layer, "SA", "FFN").forward(_computed, stream, features), layer(stream, features)
            gap, largest = (found - own).abs().max(), own.abs().max().clamp(min=1.0)
            agrees = not bool(own.isfinite().all()) or bool(gap <= _AGREES * largest)  # weights are others' affair
        except Exception:  # foreign code may raise anything
            agrees = False
    if not agrees:
        raise PolicyError(
            f"{where} is a {type(layer).__name__} whose forward is not x + gate * f(norm(x) * (1 + scale) + shift), "
            "attention first and the MLP behind it (post-norm, or another order): its blocks cannot be cached"
        )


def _computed(name: str, compute: Any) -> Any:
    return compute()


def _sizes(denoiser: Any, layer: Any, layers: int, tokens: int) -> tuple[DiTShape, dict[str, int]]:
    width, last = layer.norm1.normalized_shape[-1], list(layer.adaLN_modulation.children())[-1]
    outputs = [part.out_features for part in denoiser.time_mlp.modules() if isinstance(part, nn.Linear)]
    time_dim = outputs[-1] if outputs else 0
    hidden = [part.out_features for part in layer.mlp.modules() if isinstance(part, nn.Linear)]
    shape = DiTShape(
        width=width,
        layers=layers,
        tokens=tokens,
        cond_dim=last.in_features - time_dim,
        time_dim=time_dim,
        action_dim=denoiser.input_proj.in_features,
        hidden=hidden[0] if hidden else 0,
    )
    attention = attention_of(layer)
    widths = {
        "width": width,
        "heads": int(attention.num_heads),
        "hidden": shape.hidden,
        "tokens": tokens,
        "cond_dim": shape.cond_dim,
        "input_dim": shape.action_dim,
    }
    return shape, widths


def _layer(layer: Any, sa: str, ffn: str) -> Layer:
    def forward(route: Route, x: Tensor, features: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = layer.adaLN_modulation(features).chunk(CHUNKS, dim=1)
        x = x + gate.unsqueeze(1) * route(sa, lambda: _attend(layer, _modulated(layer.norm1(x), shift, scale)))
        fed = route(ffn, lambda: layer.mlp(_modulated(layer.norm2(x), mlp_shift, mlp_scale)))
        out: Tensor = x + mlp_gate.unsqueeze(1) * fed
        return out

    return Layer(layer, (sa, ffn), forward, layer.norm1, "x")


def _modulated(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return h * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _attend(layer: Any, h: Tensor) -> Tensor:
    attention = attention_of(layer)
    if not isinstance(attention, nn.MultiheadAttention):
        residual: Tensor = attention(h)
        return residual
    attended: Tensor = attention(h, h, h)[0]
    return attended


def _timestep(x: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
    return timestep
