"""DP-T, the transformer of Diffusion Policy: this package's, and any foreign object of that shape.

Decoder form: `decoder.layers` of pre-norm `nn.TransformerDecoderLayer` (SA, CA, FFN). Encoder-only form:
`encoder.layers` of pre-norm `nn.TransformerEncoderLayer` (SA, FFN) and no decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from blockcache.block import Block
from blockcache.errors import PolicyError
from blockcache.models.adapter import Adapter, FeedForward, Layer, Route, check_unpatched, names_by_layer
from blockcache.models.dpt.fold import fold
from blockcache.models.dpt.shape import DPTShape
from blockcache.models.weights import check_mask

FAMILY = "dp-t"
_METHODS = ("forward", "_sa_block", "_mha_block", "_ff_block")


def find(denoiser: nn.Module) -> Adapter | str:
    """An adapter if the denoiser has the shape of DP-T, else what it lacks; a PolicyError if it cannot be used as it is."""
    layers = _stack(denoiser)
    if layers is None:
        return "has no decoder.layers of TransformerDecoderLayer, nor encoder.layers of TransformerEncoderLayer"
    for index, layer in enumerate(layers):
        _check(index, layer)
    for name in ("mask", "memory_mask"):
        check_mask(f"the denoiser's {name}", getattr(denoiser, name, None))
    decoder = isinstance(layers[0], nn.TransformerDecoderLayer)
    shape, widths = _sizes(denoiser, layers, decoder)
    counted = "tokens" in widths and (not decoder or "cond_tokens" in widths)
    return Adapter(
        family=FAMILY,
        denoiser=denoiser,
        blocks=shape.blocks if counted else tuple(Block(b.name, b.kind, b.order, 0) for b in shape.blocks),
        layers=tuple(
            _decoder_layer(layer, blocks) if decoder else _encoder_layer(layer, blocks)
            for layer, blocks in zip(layers, names_by_layer(shape.blocks, len(layers)), strict=True)
        ),
        widths=widths,
        every_step=shape.every_step if counted else 0,
        fold=partial(fold, shape),
    )


def _stack(denoiser: nn.Module) -> list[Any] | None:
    """The layers of the trunk, or None if this is no DP-T."""
    for name, kind in (("decoder", nn.TransformerDecoderLayer), ("encoder", nn.TransformerEncoderLayer)):
        stack = getattr(denoiser, name, None)
        if stack is None:
            continue
        layers = list(getattr(stack, "layers", None) or ())
        return layers if layers and all(isinstance(layer, kind) for layer in layers) else None
    return None


def _check(index: int, layer: Any) -> None:
    """Refuse a layer whose forward is not the one that we express block by block."""
    where = f"layers.{index}"
    if not layer.norm_first:
        raise PolicyError(
            f"{where} is post-norm (norm_first=False): its blocks are not plain residuals and cannot be cached"
        )
    if not layer.self_attn.batch_first:
        raise PolicyError(f"{where} is not batch_first; build the denoiser with batch_first=True")
    base = nn.TransformerDecoderLayer if isinstance(layer, nn.TransformerDecoderLayer) else nn.TransformerEncoderLayer
    for name in _METHODS:
        if getattr(type(layer), name, None) is not getattr(base, name, None):
            raise PolicyError(f"{where} is a {type(layer).__name__} with its own {name}; only torch's is known")
    check_unpatched(layer, where, (*_METHODS, "__call__"))


def _sizes(denoiser: Any, layers: Sequence[Any], decoder: bool) -> tuple[DPTShape, dict[str, int]]:
    """Sizes read off the tensors. Foreign denoisers may lack some: what is unknown is 0 and binds nothing."""
    attention = layers[0].self_attn
    tokens, cond_tokens = _token_count(denoiser, "pos_emb"), _token_count(denoiser, "cond_pos_emb") if decoder else 0
    encoder_layers = getattr(getattr(denoiser, "encoder", None), "layers", ()) if decoder else ()
    shape = DPTShape(
        width=attention.embed_dim,
        layers=len(layers),
        tokens=tokens,
        cond_tokens=cond_tokens or int(decoder),
        cond_dim=getattr(getattr(denoiser, "cond_obs_emb", None), "in_features", 0),
        input_dim=getattr(getattr(denoiser, "input_emb", None), "in_features", 0),
        output_dim=getattr(getattr(denoiser, "head", None), "out_features", 0),
        cond_layers=len(encoder_layers),
        hidden=layers[0].linear1.out_features,
    )
    widths = {
        "width": shape.width,
        "heads": attention.num_heads,
        "hidden": layers[0].linear1.out_features,
        "tokens": tokens,
        "cond_tokens": cond_tokens,
        "cond_dim": shape.cond_dim,
        "input_dim": shape.input_dim,
    }
    return shape, {name: size for name, size in widths.items() if size}


def _token_count(denoiser: nn.Module, name: str) -> int:
    """Tokens of a position embedding (1, tokens, width); 0 where a foreign denoiser has none or another kind of it."""
    embedding = getattr(denoiser, name, None)
    return int(embedding.shape[1]) if isinstance(embedding, Tensor) and embedding.ndim == 3 else 0


def _decoder_layer(layer: Any, blocks: tuple[str, ...]) -> Layer:
    sa, ca, ffn = blocks

    def forward(
        route: Route,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        x = tgt
        x = x + route(sa, lambda: _self_attention(layer, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal))
        x = x + route(
            ca,
            lambda: _cross_attention(layer, x, memory, memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        return x + route(ffn, lambda: _feed_forward(layer, layer.norm3(x), layer.dropout3))

    parts = FeedForward(ffn, layer.norm3, layer.linear1, layer.activation, layer.linear2)
    values = {sa: lambda: _value_weight(layer.self_attn), ca: lambda: _value_weight(layer.multihead_attn)}
    return Layer(layer, blocks, forward, layer.norm1, "tgt", parts, values)


def _encoder_layer(layer: Any, blocks: tuple[str, ...]) -> Layer:
    sa, ffn = blocks

    def forward(
        route: Route,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        x = src
        x = x + route(sa, lambda: _self_attention(layer, x, src_mask, src_key_padding_mask, is_causal))
        return x + route(ffn, lambda: _feed_forward(layer, layer.norm2(x), layer.dropout2))

    parts = FeedForward(ffn, layer.norm2, layer.linear1, layer.activation, layer.linear2)
    return Layer(layer, blocks, forward, layer.norm1, "src", parts, {sa: lambda: _value_weight(layer.self_attn)})


def _value_weight(attention: nn.MultiheadAttention) -> Tensor:
    """W_V (d, d), which torch keeps below W_Q and W_K unless keys and values have widths of their own."""
    joint: Tensor | None = attention.in_proj_weight
    weight: Tensor = attention.v_proj_weight if joint is None else joint[2 * attention.embed_dim :]
    return weight


def _self_attention(layer: Any, x: Tensor, mask: Tensor | None, padding: Tensor | None, causal: bool) -> Tensor:
    h = layer.norm1(x)
    attended = layer.self_attn(h, h, h, attn_mask=mask, key_padding_mask=padding, is_causal=causal, need_weights=False)[
        0
    ]
    residual: Tensor = layer.dropout1(attended)
    return residual


def _cross_attention(
    layer: Any, x: Tensor, memory: Tensor, mask: Tensor | None, padding: Tensor | None, causal: bool
) -> Tensor:
    attended = layer.multihead_attn(
        layer.norm2(x),
        memory,
        memory,
        attn_mask=mask,
        key_padding_mask=padding,
        is_causal=causal,
        need_weights=False,
    )[0]
    residual: Tensor = layer.dropout2(attended)
    return residual


def _feed_forward(layer: Any, h: Tensor, dropout: nn.Module) -> Tensor:
    residual: Tensor = dropout(layer.linear2(layer.dropout(layer.activation(layer.linear1(h)))))
    return residual
