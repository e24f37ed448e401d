"""The RDT denoiser, with parameter names equal to the public checkpoints'.

Language and image tokens are attended to in turn: by the even blocks the one, by the odd ones the other. Knows nothing of
sampling or caching.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.block import CROSS_ATTENTION, FEED_FORWARD, SELF_ATTENTION
from blockcache.block import Block as CachedBlock
from blockcache.errors import PolicyError, short
from blockcache.models.flops import attention, blocks_of, feed_forward, linear

if TYPE_CHECKING:
    from blockcache.models.rdt.policy import RDTConfig

ADAPTORS = ("lang_adaptor", "img_adaptor", "state_adaptor")
_MLP = re.compile(r"mlp([1-9])x_gelu")
EPS = 1e-6
FREQUENCIES = 256  # numbers of a sinusoidal embedding
FRONT = 3
"""Tokens before the actions: the time, the control frequency and the state."""


@dataclass(frozen=True)
class RDTShape:
    """The sizes that decide the cost, in FLOPs.

    tokens: of the sequence, three more than actions.
    conditions: language and image tokens.
    adaptors: by adaptor (language, image, state) the inputs of each of its matrices.
    """

    width: int
    layers: int
    tokens: int
    horizon: int
    action_dim: int
    conditions: tuple[int, int]
    adaptors: tuple[Sequence[int], ...]

    @property
    def blocks(self) -> tuple[CachedBlock, ...]:
        """In execution order, with their costs: keys and values of the conditions are projected at every use."""
        return blocks_of(self.layers, self._costs)

    def _costs(self, layer: int) -> dict[str, int]:
        return {
            SELF_ATTENTION: attention(self.tokens, self.tokens, self.width),
            CROSS_ATTENTION: attention(self.tokens, self.conditions[layer % 2], self.width),
            FEED_FORWARD: feed_forward(self.tokens, self.width, self.width),
        }

    @property
    def every_step(self) -> int:
        """What runs at every step whatever the schedule: the sample's adaptor, two embeddings, the final layer."""
        return self._adapted(self.horizon, self.adaptors[2]) + 2 * self._embedding + self._final(self.tokens)

    @property
    def folded_blocks(self) -> tuple[CachedBlock, ...]:
        """What remains where keys and values are projected once."""

        def costs(layer: int) -> dict[str, int]:
            found = self._costs(layer)
            found[CROSS_ATTENTION] -= linear(self.conditions[layer % 2], self.width, 2 * self.width)
            return found

        return blocks_of(self.layers, costs)

    @property
    def folded_every_step(self) -> int:
        """The time's embedding is tabulated, the frequency's made once; the mask's share of the adaptor too; only actions
        leave."""
        first, *others = self.adaptors[2]
        return self._adapted(self.horizon, [first // 2, *others]) + self._final(self.horizon)

    @property
    def adapting(self) -> int:
        """Once per generation, in any engine: the conditions' adaptors."""
        return sum(map(self._adapted, (*self.conditions, 1), self.adaptors))

    @property
    def folded_once(self) -> int:
        """With the frequency's embedding, and all keys and values; the mask's share is part of the state's adaptor."""
        return self.around + linear(sum(self.conditions[i % 2] for i in range(self.layers)), self.width, 2 * self.width)

    @property
    def around(self) -> int:
        """Without keys and values."""
        return self.adapting + self._embedding

    @property
    def _embedding(self) -> int:
        return linear(1, FREQUENCIES, self.width) + linear(1, self.width, self.width)

    def _adapted(self, tokens: int, inputs: Sequence[int]) -> int:
        return sum(linear(tokens, size, self.width) for size in inputs)

    def _final(self, tokens: int) -> int:
        return linear(tokens, self.width, self.width) + linear(tokens, self.width, self.action_dim)


class Norm(nn.Module):
    """Divides by a spread of the last axis, its mean left in, and multiplies by a gain; `kind` is one of `policy.NORMS`."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.eps = EPS
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return divided(x, self.kind, self.eps) * self.weight


def divided(x: Tensor, kind: str, eps: float) -> Tensor:
    """x over its standard deviation ("std") or its root mean square ("rms")."""
    power = x.var(dim=-1, keepdim=True) if kind == "std" else x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(power + eps)


class Attention(nn.Module):
    """Self-attention with normed queries and keys."""

    def __init__(self, width: int, heads: int, norm: str) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = Norm(width // heads, norm), Norm(width // heads, norm)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d / H) each
        attended = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(attended.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """The same to other tokens c (B, S, d); `mask` (B, S) is True where there is something to attend to."""

    def __init__(self, width: int, heads: int, norm: str) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.q_norm, self.k_norm = Norm(width // heads, norm), Norm(width // heads, norm)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, c: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(c).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        visible = None if mask is None else mask[:, None, None]
        attended = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=visible)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two matrices, the hidden layer as wide as the input."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    """Three residual branches, each behind a norm of its own."""

    def __init__(self, width: int, heads: int, norm: str) -> None:
        super().__init__()
        self.norm1, self.attn = Norm(width, norm), Attention(width, heads, norm)
        self.norm2, self.cross_attn = Norm(width, norm), CrossAttention(width, heads, norm)
        self.norm3, self.ffn = Norm(width, norm), Mlp(width, width)

    def forward(self, x: Tensor, c: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.cross_attn(self.norm2(x), c, mask)
        return x + self.ffn(self.norm3(x))


class SinusoidalEmbedder(nn.Module):
    """Cosines and sines of a number, through two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:  # (B,) -> (B, width)
        angle = t[:, None].float() * frequencies(t.device)
        like = next(self.mlp.parameters())
        return self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1).to(like.dtype))


def frequencies(device: torch.device) -> Tensor:
    """(128,) from 1 down to almost 1 / 10000."""
    half = FREQUENCIES // 2
    return torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=device) / half)


class FinalLayer(nn.Module):
    def __init__(self, width: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.norm_final, self.ffn_final = Norm(width, norm), Mlp(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn_final(self.norm_final(x))


class RDT(nn.Module):
    """The transformer. Its tokens are [time, control frequency, state, actions]."""

    def __init__(self, config: RDTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.horizon = config.horizon
        self.t_embedder, self.freq_embedder = SinusoidalEmbedder(width), SinusoidalEmbedder(width)
        self.x_pos_embed = _places(FRONT + config.horizon, width)
        self.lang_cond_pos_embed = _places(config.max_lang_cond_len, width)
        self.img_cond_pos_embed = _places(config.img_cond_len, width)
        self.blocks = nn.ModuleList(Block(width, config.num_heads, config.norm) for _ in range(config.depth))
        self.final_layer = FinalLayer(width, config.action_dim, config.norm)

    def forward(
        self,
        x: Tensor,
        freq: Tensor,
        t: Tensor,
        lang_c: Tensor,
        img_c: Tensor,
        lang_mask: Tensor | None = None,
        img_mask: Tensor | None = None,
    ) -> Tensor:
        """Embedded state and actions x (B, 1 + horizon, d), freq (B,), t (B,) or (1,), adapted language and image tokens
        (B, S, d) and what of them is there (B, S) -> (B, horizon, outputs)."""
        time = self.t_embedder(t)[:, None].expand(len(x), -1, -1)
        x = torch.cat([time, self.freq_embedder(freq)[:, None], x], dim=1) + self.x_pos_embed
        conditions = (
            (lang_c + self.lang_cond_pos_embed[:, : lang_c.shape[1]], lang_mask),
            (img_c + self.img_cond_pos_embed, img_mask),
        )
        for index, block in enumerate(self.blocks):
            x = block(x, *conditions[index % 2])
        return self.final_layer(x)[:, -self.horizon :]


def _places(tokens: int, width: int) -> nn.Parameter:
    return nn.Parameter(0.02 * torch.randn(1, tokens, width))


def linears_of(adaptor: str) -> int:
    """How many matrices an adaptor has, by the name that the public code gives it."""
    if adaptor == "linear":
        return 1
    found = _MLP.fullmatch(adaptor)
    if found is None:
        raise PolicyError(f"an adaptor must be 'linear' or 'mlpNx_gelu', N from 1 to 9, got {short(adaptor)}")
    return int(found.group(1))


def adaptor(name: str, inputs: int, width: int) -> nn.Module:
    """From tokens of an encoder to tokens of the transformer."""
    count = linears_of(name)
    if name == "linear":
        return nn.Linear(inputs, width)
    layers: list[nn.Module] = [nn.Linear(inputs, width)]
    for _ in range(count - 1):
        layers += [nn.GELU(approximate="tanh"), nn.Linear(width, width)]
    return nn.Sequential(*layers)


class RDTDenoiser(nn.Module):
    """The transformer and its adaptors, as the public runner holds them: its state dict has the public names."""

    def __init__(
        self, model: nn.Module, lang_adaptor: nn.Module, img_adaptor: nn.Module, state_adaptor: nn.Module
    ) -> None:
        super().__init__()
        self.model = model
        self.lang_adaptor, self.img_adaptor, self.state_adaptor = lang_adaptor, img_adaptor, state_adaptor

    @classmethod
    def of(cls, config: RDTConfig) -> RDTDenoiser:
        width = config.hidden_size
        return cls(
            RDT(config),
            adaptor(config.lang_adaptor, config.lang_token_dim, width),
            adaptor(config.img_adaptor, config.img_token_dim, width),
            adaptor(config.state_adaptor, 2 * config.action_dim, width),
        )

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        state: Tensor,
        lang: Tensor,
        lang_mask: Tensor,
        img: Tensor,
        action_mask: Tensor,
        ctrl_freqs: Tensor,
    ) -> Tensor:
        """The sample (B, T, A) at a timestep, and a generation's adapted conditions: state (B, 1, d), lang (B, L, d) with
        its mask (B, L), img (B, S, d), action_mask (B, 1, A), ctrl_freqs (B,)."""
        actions = self.state_adaptor(torch.cat([sample, action_mask.expand_as(sample)], dim=-1))
        tokens = torch.cat([state, actions], dim=1)
        return self.model(tokens, ctrl_freqs, timestep.reshape(-1), lang, img, lang_mask=lang_mask)
