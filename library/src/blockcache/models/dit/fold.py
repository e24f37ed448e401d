"""A DiT policy folded into its program. Exact algebra, done once at build time, in float64.

Folded in, so that nothing is left to do in the loop: the attention scale into the query matrix, position embeddings into the
first projection's bias, the 1 of `1 + scale` into the modulation's bias, and the time's half of the modulation into a table
of all K steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.models.dit.denoiser import embed_time
from blockcache.models.dit.flops import CHUNKS, DiTShape
from blockcache.models.dit.program import DiTProgram
from blockcache.models.folding import cast, double, linear, named, refuse, scaled_queries, signature
from blockcache.models.program import Table, UnsupportedError

_SCALES = (1, 4)  # which of a layer's six chunks have a 1 added to them


def fold(port: Any) -> DiTProgram:
    """Fold the policy behind a port with `program_inputs`, or say what about it cannot be."""
    denoiser = port.adapter.denoiser
    layers = list(denoiser.transformer_blocks)
    require_supported(denoiser, layers)
    like, widths, entry = denoiser.input_proj.weight, port.adapter.widths, port.program_inputs
    features = time_features(port.timesteps, denoiser.time_mlp)  # (K, time_dim), behind their SiLU
    shape = DiTShape(
        width=widths["width"],
        layers=len(layers),
        tokens=widths["tokens"],
        cond_dim=widths["cond_dim"],
        time_dim=features.shape[1],
        action_dim=widths["input_dim"],
        hidden=widths["hidden"],
    )
    rotation = _rotation(layers, shape, widths["heads"])
    time_w, condition_w, condition_b = modulation(layers, shape)
    start = double(denoiser.input_proj.bias).expand(shape.tokens, -1)
    if getattr(denoiser, "pos_embedding", None) is not None:
        start = start + double(denoiser.pos_embedding)[0, : shape.tokens]
    weights = {
        "start": start,
        "input_w": double(denoiser.input_proj.weight).T,
        "output_w": double(denoiser.output_proj.weight).T,
        "output_b": double(denoiser.output_proj.bias),
        "condition_w": condition_w,
        "condition_b": condition_b,
        "every_token": torch.ones(1, shape.tokens, 1),
        **rotation,
        **entry.weights,
    }
    for index, layer in enumerate(layers):
        weights |= _layer(layer, index, shape.width, widths["heads"])
    table = (features @ time_w).view(len(features), 1, shape.layers * CHUNKS, shape.width)
    eps = float(layers[0].norm1.eps)
    return DiTProgram(
        inputs=entry.inputs,
        chunk=(shape.tokens, shape.action_dim),
        tokens=shape.tokens,
        executed=port.executed,
        action_dim=shape.action_dim,
        blocks=shape.blocks,
        once=shape.modulation(shape.cond_dim),
        every_step=shape.ends,
        weights={name: cast(tensor, like) for name, tensor in weights.items()},
        tables={"time": Table(cast(table, like), (1, shape.layers * CHUNKS, shape.width))},
        gated=True,
        signature=signature((eps, dict(entry.inputs)), features, *rotation.values()),
        shape=shape,
        heads=widths["heads"],
        norm_eps=eps,
        rotary=bool(rotation),
        moments=entry.moments,
        vectors=entry.vectors,
    )


def attention_of(layer: Any) -> Any:
    """The attention module of a layer, rotary or torch's own; None if it has neither."""
    return getattr(layer, "attn", None) or getattr(layer, "multihead_attn", None)


def require_supported(denoiser: Any, layers: list[Any]) -> None:
    """The forms that the folding above is written for; anything else has the patched engine."""
    attentions = [attention_of(layer) for layer in layers]
    norms = [norm for layer in layers for norm in (layer.norm1, layer.norm2)]
    refuse(
        (not isinstance(denoiser.time_mlp, nn.Sequential), "a time_mlp that is no Sequential"),
        (len({type(attention) for attention in attentions}) > 1, "attention of several kinds"),
        (any(not _is_plain(attention) for attention in attentions), "attention of another kind"),
        (any(norm.elementwise_affine for norm in norms), "norms with a gain of their own"),
        (len({norm.eps for norm in norms}) > 1, "norms with different eps"),
        (any(not _is_mlp(layer.mlp) for layer in layers), "an MLP other than Linear, GELU (tanh), Linear"),
        (any(not _is_silu(layer.adaLN_modulation) for layer in layers), "a modulation other than SiLU, Linear"),
        (not isinstance(denoiser.input_proj, nn.Linear), "an input_proj other than Linear"),
        (not isinstance(denoiser.output_proj, nn.Linear), "an output_proj other than Linear"),
    )


def _is_plain(attention: Any) -> bool:
    if type(attention) is nn.MultiheadAttention:
        return attention.in_proj_bias is not None and attention.bias_k is None and not attention.add_zero_attn
    return all(isinstance(part, nn.Linear) for part in (attention.qkv_proj, attention.out_proj))


def _is_mlp(mlp: Any) -> bool:
    kinds = [type(part) for part in mlp if not isinstance(part, nn.Dropout)]
    return kinds == [nn.Linear, nn.GELU, nn.Linear] and mlp[1].approximate == "tanh"


def _is_silu(modulation: Any) -> bool:
    return [type(part) for part in modulation] == [nn.SiLU, nn.Linear]


def time_features(timesteps: tuple[float, ...], time_mlp: nn.Sequential) -> Tensor:
    """SiLU of the time's features at all steps, (K, time_dim), computed as the policy's own loop does it."""
    times = torch.tensor(timesteps, dtype=torch.float32, device=next(time_mlp.parameters()).device)
    with torch.no_grad():
        return F.silu(embed_time(time_mlp, times).to(torch.float64))


def modulation(layers: list[Any], shape: DiTShape) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices of the time (time_dim, L * 6 * d) and of the conditions (C, L * 6 * d), and the bias of both."""
    pairs = [linear(layer.adaLN_modulation[1]) for layer in layers]
    biases = []
    for _, own in pairs:
        bias = own.view(CHUNKS, shape.width).clone()
        bias[list(_SCALES)] += 1.0
        biases.append(bias.flatten())
    both = torch.cat([w for w, _ in pairs], dim=1)
    return both[: shape.time_dim], both[shape.time_dim :], torch.cat(biases)


def _layer(layer: Any, index: int, width: int, heads: int) -> dict[str, Tensor]:
    attention = attention_of(layer)
    if isinstance(attention, nn.MultiheadAttention):
        own = double(attention.in_proj_weight).T, double(attention.in_proj_bias)
    else:
        own = linear(attention.qkv_proj)
    own_w, own_b = scaled_queries(own, width, heads)
    pairs = {
        "qk": (own_w[:, : 2 * width], own_b[: 2 * width]),
        "v": (own_w[:, 2 * width :], own_b[2 * width :]),
        "out": linear(attention.out_proj),
        "up": linear(layer.mlp[0]),
        "down": linear([part for part in layer.mlp if isinstance(part, nn.Linear)][-1]),
    }
    return {key: tensor for name, pair in pairs.items() for key, tensor in named(name, pair, index).items()}


def _rotation(layers: list[Any], shape: DiTShape, heads: int) -> dict[str, Tensor]:
    """What queries and keys are multiplied by, (1, T, 2 * d) each: cosines, and sines with their signs. Read off what the
    policy's own rotation does, and compared with it: there are several kinds."""
    ropes = [attention_of(layer).rope for layer in layers if hasattr(attention_of(layer), "rope")]
    if not ropes:
        return {}
    size = shape.width // heads
    like = next(layers[0].parameters())
    probe = torch.zeros(3, 1, shape.tokens, size, dtype=like.dtype, device=like.device)
    probe[0, ..., : size // 2], probe[1, ..., size // 2 :] = 1.0, 1.0
    probe[2] = torch.sin(torch.arange(float(size)))
    found = []
    with torch.no_grad():
        for rope in ropes:
            (first, second, turned), _ = rope(probe, probe)  # (1, T, size) each
            cos = torch.cat([first[..., : size // 2], second[..., size // 2 :]], dim=-1)
            sin = torch.cat([second[..., : size // 2], first[..., size // 2 :]], dim=-1)
            found.append((cos, sin))
            again = probe[2] * cos + probe[2].roll(size // 2, dims=-1) * sin
            if not torch.allclose(again, turned, atol=1e-4) or not torch.equal(found[0][0], cos):
                raise UnsupportedError("rotary positions of another kind")
    return {name: double(part).repeat(1, 1, 2 * heads) for name, part in zip(("cos", "sin"), found[0], strict=True)}
