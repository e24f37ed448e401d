"""The DP-T denoiser, the transformer of Diffusion Policy, with the parameter names of the public checkpoints.

Three forms: a decoder that attends to condition tokens encoded by an MLP or by a transformer, and an encoder-only
form in which the time is a token of the sequence itself. `find` makes the adapter of such a denoiser, this package's or any
foreign object of that shape. Knows nothing of sampling or normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.block import Block
from blockcache.errors import PolicyError
from blockcache.models.adapter import Adapter, FeedForward, Layer, Route, check_unpatched, names_by_layer
from blockcache.models.dpt.fold import fold
from blockcache.models.flops import DPTShape
from blockcache.models.modules import check_mask

FAMILY = "dp-t"
_METHODS = ("forward", "_sa_block", "_mha_block", "_ff_block")


class SinusoidalEmbedding(nn.Module):
    """The usual sine and cosine embedding of a timestep. No parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, timesteps: Tensor) -> Tensor:  # (B,) -> (B, width)
        half = self.width // 2
        exponent = torch.arange(half, device=timesteps.device) * (-math.log(10000.0) / (half - 1))
        angle = timesteps[:, None] * torch.exp(exponent)[None, :]
        return torch.cat((angle.sin(), angle.cos()), dim=-1)


class DiffusionTransformer(nn.Module):
    """Predicts noise (or the clean sample) for a chunk of tokens at a timestep, given observation tokens.

    With `cond_dim` = 0 nothing is attended to but the time; with `time_as_cond` = False as well there is no
    cross-attention at all and `encoder` is the trunk (encoder-only form).
    """

    memory_mask: Tensor | None
    mask: Tensor | None

    def __init__(
        self,
        *,
        input_dim: int,
        output_dim: int,
        horizon: int,
        n_obs_steps: int,
        cond_dim: int = 0,
        n_layer: int = 8,
        n_head: int = 4,
        n_emb: int = 256,
        p_drop_emb: float = 0.0,
        p_drop_attn: float = 0.1,
        causal_attn: bool = True,
        time_as_cond: bool = True,
        n_cond_layers: int = 0,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.obs_as_cond = cond_dim > 0
        self.time_as_cond = time_as_cond
        self.encoder_only = not time_as_cond
        tokens = horizon if time_as_cond else horizon + 1
        cond_tokens = int(time_as_cond) + (n_obs_steps if self.obs_as_cond else 0)

        self.input_emb = nn.Linear(input_dim, n_emb)
        self.pos_emb = nn.Parameter(torch.zeros(1, tokens, n_emb))
        self.drop = nn.Dropout(p_drop_emb)
        self.time_emb = SinusoidalEmbedding(n_emb)
        self.cond_obs_emb = nn.Linear(cond_dim, n_emb) if self.obs_as_cond else None
        self.cond_pos_emb = None
        self.decoder = None
        self.encoder: nn.Module
        if self.encoder_only:
            self.encoder = _encoder(n_emb, n_head, p_drop_attn, n_layer)
        else:
            self.cond_pos_emb = nn.Parameter(torch.zeros(1, cond_tokens, n_emb))
            self.encoder = (
                _encoder(n_emb, n_head, p_drop_attn, n_cond_layers)
                if n_cond_layers > 0
                else nn.Sequential(nn.Linear(n_emb, 4 * n_emb), nn.Mish(), nn.Linear(4 * n_emb, n_emb))
            )
            layer = nn.TransformerDecoderLayer(
                n_emb, n_head, 4 * n_emb, p_drop_attn, "gelu", batch_first=True, norm_first=True
            )
            self.decoder = nn.TransformerDecoder(layer, n_layer)
        self.register_buffer("mask", _causal_mask(tokens) if causal_attn else None)
        self.register_buffer(
            "memory_mask", _memory_mask(tokens, cond_tokens) if causal_attn and self.obs_as_cond else None
        )
        self.ln_f = nn.LayerNorm(n_emb)
        self.head = nn.Linear(n_emb, output_dim)
        self._initialise()

    def forward(self, sample: Tensor, timestep: Tensor | float | int, cond: Tensor | None = None) -> Tensor:
        """sample (B, T, input), timestep () or (B,), cond (B, n_obs, cond) -> (B, T, output)."""
        timesteps = torch.as_tensor(timestep, device=sample.device).reshape(-1).expand(sample.shape[0])
        time = self.time_emb(timesteps).to(sample.dtype).unsqueeze(1)  # (B, 1, d)
        x = self.input_emb(sample)
        if self.encoder_only:
            x = torch.cat((time, x), dim=1)
            x = self.drop(x + self.pos_emb[:, : x.shape[1]])
            x = self.encoder(src=x, mask=self.mask)[:, 1:]
        else:
            memory = self.encode(time, cond)
            x = self.drop(x + self.pos_emb[:, : x.shape[1]])
            assert self.decoder is not None
            x = self.decoder(tgt=x, memory=memory, tgt_mask=self.mask, memory_mask=self.memory_mask)
        return self.head(self.ln_f(x))

    def encode(self, time: Tensor, cond: Tensor | None) -> Tensor:
        """The condition tokens that the decoder attends to: time first, then the observations."""
        tokens = time
        if self.cond_obs_emb is not None:
            tokens = torch.cat((time, self.cond_obs_emb(cond)), dim=1)
        assert self.cond_pos_emb is not None
        return self.encoder(self.drop(tokens + self.cond_pos_emb[:, : tokens.shape[1]]))

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.MultiheadAttention):
                nn.init.normal_(module.in_proj_weight, std=0.02)
                nn.init.zeros_(module.in_proj_bias)
        for embedding in (self.pos_emb, self.cond_pos_emb):
            if embedding is not None:
                nn.init.normal_(embedding, std=0.02)


def _encoder(width: int, heads: int, dropout: float, layers: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
    # nested tensors are never used with pre-norm layers; saying so avoids torch's warning
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _causal_mask(tokens: int) -> Tensor:
    """0 where token t may see token s (s <= t), -inf elsewhere."""
    return torch.full((tokens, tokens), float("-inf")).triu(diagonal=1)


def _memory_mask(tokens: int, cond_tokens: int) -> Tensor:
    """Action t sees the time (s = 0) and the observations s - 1 <= t."""
    t, s = torch.meshgrid(torch.arange(tokens), torch.arange(cond_tokens), indexing="ij")
    return torch.zeros(tokens, cond_tokens).masked_fill(t < s - 1, float("-inf"))


# -- as blockcache sees it


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
    """Refuse a layer whose forward is not the one that the adapter expresses block by block."""
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
        x = x + route(sa, lambda: layer._sa_block(layer.norm1(x), tgt_mask, tgt_key_padding_mask, tgt_is_causal))
        masks = memory_mask, memory_key_padding_mask, memory_is_causal
        x = x + route(ca, lambda: layer._mha_block(layer.norm2(x), memory, *masks))
        return x + route(ffn, lambda: layer._ff_block(layer.norm3(x)))

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
        x = x + route(sa, lambda: layer._sa_block(layer.norm1(x), src_mask, src_key_padding_mask, is_causal))
        return x + route(ffn, lambda: layer._ff_block(layer.norm2(x)))

    parts = FeedForward(ffn, layer.norm2, layer.linear1, layer.activation, layer.linear2)
    return Layer(layer, blocks, forward, layer.norm1, "src", parts, {sa: lambda: _value_weight(layer.self_attn)})


def _value_weight(attention: nn.MultiheadAttention) -> Tensor:
    """W_V (d, d), which torch keeps below W_Q and W_K unless keys and values have widths of their own."""
    joint: Tensor | None = attention.in_proj_weight
    return attention.v_proj_weight if joint is None else joint[2 * attention.embed_dim :]
