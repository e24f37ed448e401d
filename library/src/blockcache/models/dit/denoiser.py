"""The adaLN DiT denoiser, with parameter names equal to those of LeRobot's `multi_task_dit` checkpoints.

One conditioning vector modulates every block: `x + gate * f(norm(x) * (1 + scale) + shift)`. Knows nothing of sampling,
normalisation or caching.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.block import FEED_FORWARD, SELF_ATTENTION, Block
from blockcache.models.dpt.denoiser import SinusoidalEmbedding
from blockcache.models.flops import attention, blocks_of, feed_forward, linear

CHUNKS = 6
"""What a layer's modulation gives: shift, scale and gate of its attention, then of its MLP."""


@dataclass(frozen=True)
class DiTShape:
    """The sizes of a DiT that decide its cost, in FLOPs; `cond_dim` is the conditioning vector's, `hidden` the MLPs'."""

    width: int
    layers: int
    tokens: int
    cond_dim: int
    time_dim: int
    action_dim: int
    hidden: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The cached blocks in execution order, with their costs."""
        costs = {
            SELF_ATTENTION: attention(self.tokens, self.tokens, self.width),
            FEED_FORWARD: feed_forward(self.tokens, self.width, self.hidden),
        }
        return blocks_of(self.layers, lambda layer: costs)

    @property
    def ends(self) -> int:
        """What no saving spares a step: the first and the last projection."""
        return linear(self.tokens, self.action_dim, self.width) + linear(self.tokens, self.width, self.action_dim)

    def modulation(self, features: int) -> int:
        """All layers' modulation by so many of the features."""
        return self.layers * linear(1, features, CHUNKS * self.width)

    @property
    def every_step(self) -> int:
        """What runs at every step whatever the schedule, as the denoiser is written."""
        time = feed_forward(1, self.time_dim, 2 * self.time_dim)
        return self.ends + time + self.modulation(self.time_dim + self.cond_dim)


class Rotary(nn.Module):
    """Rotary positions: each pair (i, i + size / 2) of a head's numbers turns by an angle that grows with the token's place.

    The angles are no parameters, and no checkpoint holds them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, size: int, tokens: int, base: float) -> None:
        super().__init__()
        frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(tokens).float(), frequencies).repeat(1, 2)  # (T, size)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:  # (B, heads, T, size) each
        return self._turned(q), self._turned(k)

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        tokens = x.shape[-2]
        return x * self.cos[:tokens] + torch.cat((-second, first), dim=-1) * self.sin[:tokens]


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, tokens: int, base: float) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.rope = Rotary(width // heads, tokens, base)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d)
        batch, tokens, width = x.shape
        qkv = self.qkv_proj(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, d / heads) each
        q, k = self.rope(q, k)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """Attention and an MLP, both modulated and gated by the features of time and conditions."""

    def __init__(self, width: int, heads: int, features: int, tokens: int, rope_base: float | None) -> None:
        super().__init__()
        if rope_base is None:
            self.multihead_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        else:
            self.attn = RotaryAttention(width, heads, tokens, rope_base)
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(features, CHUNKS * width))

    def forward(self, x: Tensor, features: Tensor) -> Tensor:  # (B, T, d), (B, features)
        return run_layer(self, computed, x, features)


def attention_of(layer: Any) -> Any:
    """The attention module of a layer, rotary or torch's own; None if it has neither."""
    return getattr(layer, "attn", None) or getattr(layer, "multihead_attn", None)


def run_layer(layer: Any, route: Callable[[int, Callable[[], Tensor]], Tensor], x: Tensor, features: Tensor) -> Tensor:
    """The forward of a layer, or of a foreign one with the same parts; `route` is given the place of each block, attention 0
    and MLP 1, and a function that computes it, and gives back what its gate multiplies."""
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (
        part.unsqueeze(1) for part in layer.adaLN_modulation(features).chunk(CHUNKS, dim=1)
    )
    x = x + gate * route(0, lambda: _attend(layer, layer.norm1(x) * (1 + scale) + shift))
    return x + mlp_gate * route(1, lambda: layer.mlp(layer.norm2(x) * (1 + mlp_scale) + mlp_shift))


def computed(place: int, compute: Callable[[], Tensor]) -> Tensor:
    """The route of a layer that computes all of its blocks."""
    return compute()


def _attend(layer: Any, h: Tensor) -> Tensor:
    attention = attention_of(layer)
    return attention(h, h, h)[0] if isinstance(attention, nn.MultiheadAttention) else attention(h)


class DiT(nn.Module):
    """Predicts noise, the clean sample or a velocity for a chunk of actions at a time, given one conditioning vector."""

    def __init__(
        self,
        *,
        action_dim: int,
        horizon: int,
        cond_dim: int,
        width: int,
        layers: int,
        heads: int,
        time_dim: int,
        rope_base: float | None,
        positions: bool,
    ) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(
            SinusoidalEmbedding(time_dim),
            nn.Linear(time_dim, 2 * time_dim),
            nn.GELU(),
            nn.Linear(2 * time_dim, time_dim),
            nn.GELU(),
        )
        self.input_proj = nn.Linear(action_dim, width)
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, horizon, width)) if positions else None
        features = time_dim + cond_dim
        self.transformer_blocks = nn.ModuleList(
            Layer(width, heads, features, horizon, rope_base) for _ in range(layers)
        )
        self.output_proj = nn.Linear(width, action_dim)

    def forward(self, x: Tensor, timestep: Tensor, conditioning_vec: Tensor) -> Tensor:
        """x (B, T, A), timestep () or (B,), conditioning_vec (B, C) -> (B, T, A)."""
        times = torch.as_tensor(timestep, device=x.device).reshape(-1).expand(len(x))
        features = torch.cat([embed_time(self.time_mlp, times), conditioning_vec], dim=-1)
        stream = self.input_proj(x)
        if self.pos_embedding is not None:
            stream = stream + self.pos_embedding[:, : x.shape[1]]
        for layer in self.transformer_blocks:
            stream = layer(stream, features)
        return self.output_proj(stream)


def embed_time(time_mlp: nn.Sequential, times: Tensor) -> Tensor:
    """Features of times (n,), (n, time_dim): angles in single precision, the rest in that of the weights."""
    angles, *rest = time_mlp
    found: Tensor = angles(times).to(next(time_mlp.parameters()).dtype)
    for part in rest:
        found = part(found)
    return found
