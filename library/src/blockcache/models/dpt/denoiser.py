"""The DP-T denoiser, the transformer of Diffusion Policy, with the parameter names of the public checkpoints.

Three forms: a decoder that attends to condition tokens encoded by an MLP or by a transformer, and an encoder-only
form in which the time is a token of the sequence itself. Knows nothing of sampling, normalisation or caching.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


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
        output: Tensor = self.head(self.ln_f(x))
        return output

    def encode(self, time: Tensor, cond: Tensor | None) -> Tensor:
        """The condition tokens that the decoder attends to: time first, then the observations."""
        tokens = time
        if self.cond_obs_emb is not None:
            tokens = torch.cat((time, self.cond_obs_emb(cond)), dim=1)
        assert self.cond_pos_emb is not None
        memory: Tensor = self.encoder(self.drop(tokens + self.cond_pos_emb[:, : tokens.shape[1]]))
        return memory

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
