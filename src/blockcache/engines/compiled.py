"""A DP-T policy reduced to the matrices that a whole-loop engine multiplies by. Exact algebra, done once at build time.

Folded in, in float64, so that nothing is left to do in the loop: the observation normaliser into the observation
embedding, every LayerNorm's gain and bias into the matrix behind it, the attention scale into the query matrix and
position embeddings into biases. The time token depends on the step alone, so its condition encoding and its
cross-attention keys and values are tabulated for all K steps. Knows nothing of schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.errors import EngineError
from blockcache.models.port import Target
from blockcache.samplers import SamplerTable, table

BLOCKS_PER_LAYER = 3  # self-attention, cross-attention, feed-forward


@dataclass(frozen=True, eq=False)
class CompiledLayer:
    """Matrices stand as (inputs, outputs): `x @ w + b`."""

    qkv_w: Tensor  # (d, 3d) self-attention
    qkv_b: Tensor
    out_w: Tensor  # (d, d)
    out_b: Tensor
    query_w: Tensor  # (d, d) cross-attention
    query_b: Tensor
    cross_w: Tensor  # (d, d)
    cross_b: Tensor
    up_w: Tensor  # (d, 4d) feed-forward
    up_b: Tensor
    down_w: Tensor  # (4d, d)
    down_b: Tensor


@dataclass(frozen=True, eq=False)
class CompiledPolicy:
    """Everything that turns a raw observation and noise into actions, but for the schedule."""

    sampler: SamplerTable
    heads: int
    norm_eps: float
    n_obs_steps: int
    obs_dim: int
    horizon: int
    sample_dim: int
    executed: tuple[int, int]  # first and one behind the last token that the robot executes
    whole: bool  # whether the whole chunk is given back, or just what is executed
    causal: bool
    layers: tuple[CompiledLayer, ...]
    obs_w: Tensor  # (obs, d)
    obs_b: Tensor  # (n_obs, d)
    encode_up_w: Tensor  # (d, 4d), then Mish
    encode_up_b: Tensor
    encode_down_w: Tensor  # (4d, d)
    encode_down_b: Tensor
    memory_w: Tensor  # (d, layers * 2d): keys and values of all layers, layer by layer
    memory_b: Tensor
    time_tokens: Tensor  # (K, d) the time token before its encoding
    time_memory: Tensor  # (K, layers * 2d) and what becomes of it
    input_w: Tensor  # (D, d)
    input_b: Tensor  # (T, d)
    self_mask: Tensor | None  # (T, T), 0 or -inf
    memory_mask: Tensor | None  # (T, 1 + n_obs)
    head_w: Tensor  # (d, D)
    head_b: Tensor
    action_scale: Tensor  # (D,) robot units = sample * scale + offset
    action_offset: Tensor

    @property
    def width(self) -> int:
        return int(self.input_w.shape[1])

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """Tokens that are computed: the horizon, or fewer after `cut`."""
        return len(self.input_b)

    @property
    def cond_tokens(self) -> int:
        return 1 + self.n_obs_steps

    def encode(self, tokens: Tensor) -> Tensor:
        """The condition encoder, token by token."""
        hidden = F.mish(tokens @ self.encode_up_w + self.encode_up_b)
        return hidden @ self.encode_down_w + self.encode_down_b

    def chunk(self, batch: int) -> tuple[int, int, int]:
        return batch, self.horizon, self.sample_dim

    def finish(self, sample: Tensor) -> dict[str, Tensor]:
        """A clean sample (B, tokens, D) -> actions in robot units."""
        actions = sample * self.action_scale + self.action_offset
        action = {"action": actions[:, slice(*self.executed)]}
        return {**action, "action_pred": actions} if self.whole else action

    def cut(self, tokens: int) -> CompiledPolicy:
        """The same policy for the first tokens of the chunk only; exact with causal attention."""
        changes = {
            "whole": False,
            "input_b": self.input_b[:tokens].contiguous(),
            "self_mask": None if self.self_mask is None else self.self_mask[:tokens, :tokens].contiguous(),
            "memory_mask": None if self.memory_mask is None else self.memory_mask[:tokens].contiguous(),
        }
        return CompiledPolicy(**{item.name: getattr(self, item.name) for item in fields(self)} | changes)


def compile_policy(target: Target, engine: str) -> CompiledPolicy:
    """Fold a policy's weights, or say why this engine cannot run it and which one can."""
    _require_supported(target, engine)
    assert target.sampler is not None
    sampler = table(target.sampler)
    policy, modules, state = target.policy, target.adapter.denoiser, target.policy.state_dict()

    def double(name: str, prefix: str = "model") -> Tensor:
        if f"{prefix}.{name}" not in state:
            raise _unsupported(engine, f"a policy without the tensor {prefix}.{name}")
        tensor: Tensor = state[f"{prefix}.{name}"].detach()
        return tensor.to(torch.float64)

    def field(name: str, size: int) -> list[Tensor]:
        """Scale and offset; an identity normaliser of the public code has one number for all."""
        return [double(f"{name}.{part}", "normalizer.params_dict").expand(size) for part in ("scale", "offset")]

    width, depth = double("pos_emb").shape[-1], len(target.adapter.layers)
    heads = target.adapter.widths["heads"]
    positions = double("cond_pos_emb")[0]
    time_emb: Any = modules.time_emb

    encode_up, encode_down = _linear(double, "encoder.0"), _linear(double, "encoder.2")
    timesteps = torch.tensor(sampler.timesteps.tolist(), device=positions.device)
    time = time_emb(timesteps).detach().to(positions) + positions[0]  # (K, d)
    encoded = F.mish(time @ encode_up[0] + encode_up[1]) @ encode_down[0] + encode_down[1]
    memory_w, memory_b = _memory(double, depth, width)

    obs_w, obs_b = _linear(double, "cond_obs_emb")
    input_w, input_b = _linear(double, "input_emb")
    head_w, head_b = _after_norm(double, "ln_f", *_linear(double, "head"))
    obs_scale, obs_offset = field("obs", len(obs_w))
    action_scale, action_offset = field("action", len(input_w))
    self_mask = _mask(modules, "mask")
    values: dict[str, Any] = {
        "obs_w": obs_scale[:, None] * obs_w,
        "obs_b": obs_b + obs_offset @ obs_w + positions[1:],
        "encode_up_w": encode_up[0],
        "encode_up_b": encode_up[1],
        "encode_down_w": encode_down[0],
        "encode_down_b": encode_down[1],
        "memory_w": memory_w,
        "memory_b": memory_b,
        "time_tokens": time,
        "time_memory": encoded @ memory_w + memory_b,
        "input_w": input_w,
        "input_b": input_b + double("pos_emb")[0],
        "self_mask": self_mask,
        "memory_mask": _mask(modules, "memory_mask"),
        "head_w": head_w,
        "head_b": head_b,
        "action_scale": 1.0 / action_scale,
        "action_offset": -action_offset / action_scale,
    }
    like = state["model.pos_emb"]
    cast: dict[str, Any] = {name: None if value is None else _as(value, like) for name, value in values.items()}
    return CompiledPolicy(
        sampler=sampler,
        heads=heads,
        norm_eps=_norms(modules)[0].eps,
        n_obs_steps=int(policy.n_obs_steps),
        obs_dim=int(policy.obs_dim),
        horizon=int(policy.horizon),
        sample_dim=int(input_w.shape[0]),
        executed=executed_tokens(policy),
        whole=True,
        causal=_is_causal(self_mask),
        layers=tuple(_layer(double, index, width, heads, like) for index in range(depth)),
        **cast,
    )


def executed_tokens(policy: Any) -> tuple[int, int]:
    """First and one behind the last token that the robot executes."""
    start = int(policy.n_obs_steps) - 1
    return start, start + int(policy.n_action_steps)


def _require_supported(target: Target, engine: str) -> None:
    """The forms that the folding above is written for; anything else has the patched engine."""
    policy: Any = target.policy
    denoiser: Any = target.adapter.denoiser
    encoder: Any = getattr(denoiser, "encoder", None)
    decoder: Any = getattr(denoiser, "decoder", None)
    reasons = [
        (target.adapter.family != "dp-t", f"the family {target.adapter.family}"),
        (target.sampler is None, target.untabulated),
        (decoder is None, "the encoder-only form"),
        (getattr(denoiser, "cond_obs_emb", None) is None, "in-painted observations (obs_as_cond=False)"),
        (any(not hasattr(denoiser, name) for name in ("time_emb", "ln_f")), "a denoiser without time_emb and ln_f"),
        (hasattr(encoder, "layers"), "a transformer condition encoder"),
        (not _is_mlp(encoder), "a condition encoder other than Linear, Mish, Linear"),
        (bool(getattr(policy, "pred_action_steps_only", False)), "pred_action_steps_only"),
        (not isinstance(policy, nn.Module), "a policy that is no torch module"),
    ]
    reasons += [
        (getattr(policy, name, None) is None, f"a policy without {name}")
        for name in ("horizon", "n_obs_steps", "n_action_steps", "obs_dim", "action_dim")
    ]
    for unsupported, what in reasons:
        if unsupported:
            raise _unsupported(engine, what)
    widths, norms = target.adapter.widths, _norms(denoiser)
    attentions = [getattr(layer, name) for layer in decoder.layers for name in ("self_attn", "multihead_attn")]
    reasons = [
        (getattr(decoder, "norm", None) is not None, "a decoder with a final norm of its own"),
        (any(not _is_gelu(layer.activation) for layer in decoder.layers), "an activation other than GELU"),
        (any(not isinstance(norm, nn.LayerNorm) for norm in norms), "norms other than LayerNorm"),
        (len({getattr(norm, "eps", None) for norm in norms}) > 1, "norms with different eps"),
        (any(not _is_plain(attention, widths["heads"]) for attention in attentions), "attention of another kind"),
        (widths.get("tokens") != policy.horizon, "a horizon that is not the denoiser's number of tokens"),
        (widths.get("cond_tokens") != 1 + policy.n_obs_steps, "condition tokens other than time and observations"),
    ]
    for unsupported, what in reasons:
        if unsupported:
            raise _unsupported(engine, what)


def _unsupported(engine: str, what: str) -> EngineError:
    return EngineError(f'the {engine} engine does not support {what}; use engine="patched"')


def _is_mlp(encoder: Any) -> bool:
    kinds = (nn.Linear, nn.Mish, nn.Linear)
    return isinstance(encoder, nn.Sequential) and tuple(map(type, encoder)) == kinds


def _is_gelu(activation: Any) -> bool:
    probe = torch.linspace(-3, 3, 7)
    return bool(torch.equal(activation(probe), F.gelu(probe)))


def _is_plain(attention: Any, heads: int) -> bool:
    if type(attention) is not nn.MultiheadAttention:
        return False
    return attention.num_heads == heads and attention.bias_k is None and not attention.add_zero_attn


def _norms(denoiser: Any) -> list[Any]:
    layers = denoiser.decoder.layers
    return [*(getattr(layer, name) for layer in layers for name in ("norm1", "norm2", "norm3")), denoiser.ln_f]


def _mask(denoiser: Any, name: str) -> Tensor | None:
    """0 or -inf, to be added to the scores; torch takes True for a score that is not seen as well."""
    mask: Tensor | None = getattr(denoiser, name, None)
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)


def _is_causal(mask: Tensor | None) -> bool:
    """Whether each token sees just itself and those before it."""
    return mask is not None and bool(torch.equal(mask, torch.full_like(mask, -math.inf).triu(diagonal=1)))


def _linear(double: Callable[[str], Tensor], name: str) -> tuple[Tensor, Tensor]:
    return double(f"{name}.weight").T, double(f"{name}.bias")


def _after_norm(double: Callable[[str], Tensor], norm: str, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a norm's gain and bias into the matrix behind it: the norm itself is left with neither."""
    gain, bias = double(f"{norm}.weight"), double(f"{norm}.bias")
    return gain[:, None] * w, b + bias @ w


def _memory(double: Callable[[str], Tensor], depth: int, width: int) -> tuple[Tensor, Tensor]:
    """Key and value projections of all layers' cross-attention, side by side."""
    names = [f"decoder.layers.{index}.multihead_attn.in_proj" for index in range(depth)]
    return (
        torch.cat([double(f"{name}_weight")[width:].T for name in names], dim=1),
        torch.cat([double(f"{name}_bias")[width:] for name in names]),
    )


def _layer(double: Callable[[str], Tensor], index: int, width: int, heads: int, like: Tensor) -> CompiledLayer:
    prefix = f"decoder.layers.{index}"
    scale = math.sqrt(width // heads)
    own_w, own_b = double(f"{prefix}.self_attn.in_proj_weight").T, double(f"{prefix}.self_attn.in_proj_bias")
    scales = torch.cat([torch.full_like(own_b[:width], 1 / scale), torch.ones_like(own_b[width:])])
    query_w = double(f"{prefix}.multihead_attn.in_proj_weight")[:width].T / scale
    query_b = double(f"{prefix}.multihead_attn.in_proj_bias")[:width] / scale
    pairs = {
        "qkv": _after_norm(double, f"{prefix}.norm1", own_w * scales, own_b * scales),
        "out": _linear(double, f"{prefix}.self_attn.out_proj"),
        "query": _after_norm(double, f"{prefix}.norm2", query_w, query_b),
        "cross": _linear(double, f"{prefix}.multihead_attn.out_proj"),
        "up": _after_norm(double, f"{prefix}.norm3", *_linear(double, f"{prefix}.linear1")),
        "down": _linear(double, f"{prefix}.linear2"),
    }
    return CompiledLayer(
        **{
            f"{name}_{part}": _as(value, like)
            for name, pair in pairs.items()
            for part, value in zip("wb", pair, strict=True)
        }
    )


def _as(value: Tensor, like: Tensor) -> Tensor:
    return value.to(dtype=like.dtype, device=like.device).contiguous()
