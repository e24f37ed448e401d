"""A DP-T policy folded into its program. Exact algebra, done once at build time, in float64.

Folded in, so that nothing is left to do in the loop: the observation normaliser into the observation embedding, every
LayerNorm's gain and bias into the matrix behind it, the attention scale into the query matrix, position embeddings into
biases, cross-attention's queries into its keys and its output projection into its values. The time token depends on the
step alone, so its share of keys and values is tabulated for all K steps. Of cameras whose encoder is known, frames come in;
else the features that the policy's own encoder makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.models.dpt.cameras import CameraNetwork, networks_of, or_none
from blockcache.models.dpt.encoder import Input
from blockcache.models.dpt.program import DPTProgram
from blockcache.models.flops import DPTShape, folded_blocks, folded_every_step, folded_once
from blockcache.models.folding import (
    Pair,
    after_norm,
    cast,
    double,
    named,
    refuse,
    scaled_queries,
    signature,
    step_times,
)
from blockcache.models.port import Port
from blockcache.models.program import StepTable, UnsupportedError

FEATURES = "features"
Double = Callable[..., Tensor]
Field = Callable[[str, int], list[Tensor]]
"""(name of an input, its numbers) -> its normaliser's scale and offset."""


def fold(shape: DPTShape, port: Port) -> DPTProgram:
    """Fold the policy behind a port, whose denoiser has this shape, or say what about it cannot be."""
    require_supported(port)
    assert port.sampler is not None
    policy, modules, state = port.policy, port.adapter.denoiser, port.policy.state_dict()
    double = doubles_of(state)

    def field(name: str, size: int) -> list[Tensor]:
        """Scale and offset; an identity normaliser of the public code has one number for all."""
        both = [double(f"{name}.{part}", "normalizer.params_dict") for part in ("scale", "offset")]
        if any(tuple(tensor.shape) not in ((1,), (size,)) for tensor in both):
            raise UnsupportedError(f"a normaliser of {name} with another number of values than {size}")
        return [tensor.expand(size) for tensor in both]

    heads = port.adapter.widths["heads"]
    positions = double("cond_pos_emb")[0]
    obs_w, obs_b = linear_of(double, "cond_obs_emb")
    input_w, input_b = linear_of(double, "input_emb")
    seen = fold_inputs(policy, field, obs_w, obs_b)
    action_scale, action_offset = field("action", len(input_w))
    masks = {name: _mask(modules, name) for name in ("mask", "memory_mask")}
    weights = {
        **seen.weights,
        "obs_b": seen.bias + positions[1:],
        **named({"encode_up": linear_of(double, "encoder.0"), "encode_down": linear_of(double, "encoder.2")}),
        **named({"head": _after_norm(double, "ln_f", linear_of(double, "head"))}),
        "input_w": input_w,
        "positions": input_b + double("pos_emb")[0],
        "action_scale": 1.0 / action_scale,
        "action_offset": -action_offset / action_scale,
        "self_mask": torch.zeros(shape.tokens, shape.tokens) if masks["mask"] is None else masks["mask"],
    }
    for index in range(shape.layers):
        weights |= _layer(double, index, shape.width, heads)
    # (1, 1, T, H * S): head by head
    visible = torch.zeros(shape.tokens, shape.cond_tokens) if masks["memory_mask"] is None else masks["memory_mask"]
    weights["memory_mask"] = visible.repeat(1, heads)[None, None]
    time, encoded = time_tokens(port, double)
    crossed, tables = _cross_attention(double, shape, heads, encoded)
    like = state["model.pos_emb"]
    eps = norms(modules)[0].eps
    return DPTProgram(
        inputs=seen.inputs,
        cameras=tuple(network.camera for network in seen.networks),
        features=sum(network.features for network in seen.networks),
        chunk=(shape.tokens, len(input_w)),
        tokens=shape.tokens,
        executed=port.executed,
        action_dim=len(input_w),
        blocks=folded_blocks(shape, heads),
        once=folded_once(shape) + sum(network.flops for network in seen.networks) * (shape.cond_tokens - 1),
        every_step=folded_every_step(shape),
        weights={name: cast(tensor, like) for name, tensor in (weights | crossed).items()},
        tables={name: StepTable(cast(item.values, like), item.shape, item.pads) for name, item in tables.items()},
        causal=_is_causal(masks["mask"]),
        signature=signature((eps, seen.inputs, seen.entries, seen.networks), time, *masks.values()),
        shape=shape,
        heads=heads,
        norm_eps=eps,
        self_masked=masks["mask"] is not None,
        entries=seen.entries,
        networks=seen.networks,
    )


def doubles_of(state: Mapping[str, Tensor]) -> Double:
    """A function that gives the tensors of a policy's denoiser by name, in float64.

    Args:
        state: the policy's tensors by name, the denoiser's below "model".
    """

    def find(name: str, prefix: str = "model") -> Tensor:
        if f"{prefix}.{name}" not in state:
            raise UnsupportedError(f"a policy without the tensor {prefix}.{name}")
        return double(state[f"{prefix}.{name}"], f"{prefix}.{name}")

    return find


def time_tokens(port: Port, double: Double) -> tuple[Tensor, Tensor]:
    """The time token of every step, (K, d), before and behind its encoding.

    Args:
        port: the policy.
        double: gives the tensors, see `doubles_of`.
    """
    positions, denoiser = double("cond_pos_emb")[0], port.adapter.denoiser
    embed: Any = denoiser.time_emb
    time = embed(step_times(port, positions.device)).detach().to(positions) + positions[0]
    (up_w, up_b), (down_w, down_b) = (linear_of(double, f"encoder.{place}") for place in (0, 2))
    return time, F.mish(time @ up_w + up_b) @ down_w + down_b


def _cross_attention(
    double: Double, shape: DPTShape, heads: int, time: Tensor
) -> tuple[dict[str, Tensor], dict[str, StepTable]]:
    """From encoded condition tokens to what cross-attention multiplies by, and the time token's share by step.

    `time` (K, d) is the time token, encoded.
    """
    width, depth, size = shape.width, shape.layers, shape.width // heads
    observed, columns = shape.cond_tokens - 1, heads * shape.cond_tokens
    names = [f"decoder.layers.{index}.multihead_attn" for index in range(depth)]
    projections = [key_value_of(double, name, width) for name in names]
    query_folded, output_folded, cross_b = [], [], []
    for index, name in enumerate(names):
        query_w, query_b = query_of(double, index, width, heads)
        augmented = torch.cat([query_w, query_b[None]])  # (d + 1, d): the bias as the last row
        query_folded.append(augmented.reshape(width + 1, heads, size).permute(1, 2, 0))  # (H, d / H, d + 1)
        output_w, output_b = linear_of(double, f"{name}.out_proj")
        output_folded.append(output_w.reshape(heads, size, width))
        # on every row of the first head: a head's probabilities sum to one
        bias = torch.zeros(columns, width, dtype=output_b.dtype, device=output_b.device)
        bias[: shape.cond_tokens] = output_b
        cross_b.append(bias[None])
    shares: dict[str, list[Tensor]] = {"w": [], "b": [], "v": []}
    for (key_w, key_b, value_w, value_b), query, output in zip(projections, query_folded, output_folded, strict=True):
        keys, values = ((time @ w + b).view(-1, heads, size) for w, b in ((key_w, key_b), (value_w, value_b)))
        both = torch.einsum("hed,khe->kdh", query, keys)  # (K, d + 1, H)
        shares["w"].append(both[:, :-1])
        shares["b"].append(both[:, -1:])
        shares["v"].append(torch.einsum("hed,khe->khd", output, values))
    constants = {
        "key_w": torch.cat([item[0] for item in projections], dim=1),  # (d, L * d)
        "key_b": torch.cat([item[1] for item in projections]),
        "key_folded": torch.cat(query_folded),  # (L * H, d / H, d + 1)
        "value_w": torch.cat([item[2] for item in projections], dim=1),
        "value_b": torch.cat([item[3] for item in projections]),
        "value_folded": torch.cat(output_folded),  # (L * H, d / H, d)
        "cross_b": torch.stack(cross_b),  # (L, 1, H * S, d)
    }
    w, b, v = (torch.stack(shares[name], dim=1) for name in "wbv")  # (K, L, d, H), (K, L, 1, H), (K, L, H, d)
    tables = {
        "time_w": StepTable(w[..., None], (1, width, columns), (0, 0, observed)),
        "time_b": StepTable(b[..., None], (1, 1, columns), (0, 0, observed)),
        "time_v": StepTable(v[:, :, :, None], (1, columns, width), (0, observed, 0)),
    }
    return constants, tables


def require_supported(port: Port) -> None:
    """The forms that the folding above is written for; anything else has the patched engine."""
    policy: Any = port.policy
    denoiser: Any = port.adapter.denoiser
    encoder: Any = getattr(denoiser, "encoder", None)
    decoder: Any = getattr(denoiser, "decoder", None)
    refuse(
        (decoder is None, "the encoder-only form"),
        (getattr(denoiser, "cond_obs_emb", None) is None, "in-painted observations (obs_as_cond=False)"),
        (any(not hasattr(denoiser, name) for name in ("time_emb", "ln_f")), "a denoiser without time_emb and ln_f"),
        (hasattr(encoder, "layers"), "a transformer condition encoder"),
        (not _is_mlp(encoder), "a condition encoder other than Linear, Mish, Linear"),
        (bool(getattr(policy, "pred_action_steps_only", False)), "pred_action_steps_only"),
        (not isinstance(policy, nn.Module), "a policy that is no torch module"),
        *(
            (getattr(policy, name, None) is None, f"a policy without {name}")
            for name in ("horizon", "n_obs_steps", "n_action_steps", "obs_dim", "action_dim")
            if name != "obs_dim" or getattr(policy, "obs_encoder", None) is None
        ),
    )
    widths, all_norms = port.adapter.widths, norms(denoiser)
    attentions = [getattr(layer, name) for layer in decoder.layers for name in ("self_attn", "multihead_attn")]
    refuse(
        (getattr(decoder, "norm", None) is not None, "a decoder with a final norm of its own"),
        (any(not _is_gelu(layer.activation) for layer in decoder.layers), "an activation other than GELU"),
        (any(not isinstance(norm, nn.LayerNorm) for norm in all_norms), "norms other than LayerNorm"),
        (len({getattr(norm, "eps", None) for norm in all_norms}) > 1, "norms with different eps"),
        (any(not _is_plain(attention, widths["heads"]) for attention in attentions), "attention of another kind"),
        (widths.get("tokens") != policy.horizon, "a horizon that is not the denoiser's number of tokens"),
        (widths.get("cond_tokens") != 1 + policy.n_obs_steps, "condition tokens other than time and observations"),
    )


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


def norms(denoiser: Any) -> list[Any]:
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


def linear_of(double: Double, name: str) -> Pair:
    """A Linear's matrix (inputs, outputs) and its bias.

    Args:
        double: gives the tensors, see `doubles_of`.
        name: of the Linear.
    """
    return double(f"{name}.weight").T, double(f"{name}.bias")


def _after_norm(double: Double, norm: str, pair: Pair) -> Pair:
    return after_norm(double(f"{norm}.weight"), double(f"{norm}.bias"), pair)


def query_of(double: Double, index: int, width: int, heads: int) -> Pair:
    """A cross-attention's matrix of the queries, with the norm before it and the scale of the scores.

    Args:
        double: gives the tensors, see `doubles_of`.
        index: of the layer.
        width: numbers of a token.
        heads: how many share them.
    """
    prefix, scale = f"decoder.layers.{index}", math.sqrt(width // heads)
    w = double(f"{prefix}.multihead_attn.in_proj_weight")[:width].T / scale
    b = double(f"{prefix}.multihead_attn.in_proj_bias")[:width] / scale
    return _after_norm(double, f"{prefix}.norm2", (w, b))


def key_value_of(double: Double, name: str, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w and b of a cross-attention's keys, then of its values.

    Args:
        double: gives the tensors, see `doubles_of`.
        name: of the attention.
        width: numbers of a token.
    """
    w, b = double(f"{name}.in_proj_weight").T, double(f"{name}.in_proj_bias")
    return w[:, width : 2 * width], b[width : 2 * width], w[:, 2 * width :], b[2 * width :]


def _layer(double: Double, index: int, width: int, heads: int) -> dict[str, Tensor]:
    prefix = f"decoder.layers.{index}"
    own = double(f"{prefix}.self_attn.in_proj_weight").T, double(f"{prefix}.self_attn.in_proj_bias")
    pairs = {
        "qkv": _after_norm(double, f"{prefix}.norm1", scaled_queries(own, width, heads)),
        "out": linear_of(double, f"{prefix}.self_attn.out_proj"),
        "up": _after_norm(double, f"{prefix}.norm3", linear_of(double, f"{prefix}.linear1")),
        "down": linear_of(double, f"{prefix}.linear2"),
    }
    return named(pairs, index)


# -- how an observation enters: numbers by one matrix, in which their normaliser is; frames as features


@dataclass(frozen=True, eq=False)
class ProgramInputs:
    """`entries` names the matrix of what each part is multiplied by, `bias` (d,) is what all of them have in common."""

    inputs: Mapping[str, tuple[int, ...]]
    entries: Mapping[str, str]
    weights: Mapping[str, Tensor]
    bias: Tensor
    networks: tuple[CameraNetwork, ...] = ()


def fold_inputs(policy: Any, normalizer: Field, w: Tensor, b: Tensor) -> ProgramInputs:
    """Fold what stands before the observation tokens: w (inputs, d) and b (d,) are the observation embedding."""
    moments, encoder = int(policy.n_obs_steps), getattr(policy, "obs_encoder", None)
    known = None if encoder is None else or_none(encoder)
    if encoder is not None and known is None:
        return ProgramInputs({FEATURES: (moments, len(w))}, {FEATURES: "obs_w"}, {"obs_w": w}, b)
    items = (Input("obs", (len(w),)),) if known is None else known.config.inputs
    networks, constants = ((), {}) if known is None else networks_of(known)
    sizes = {network.camera: network.features for network in networks}
    weights = {name: tensor.to(torch.float64) for name, tensor in constants.items()}
    entries = {FEATURES: "obs_w"} if networks else {}
    of_cameras, at = list[Tensor](), 0
    for item in items:
        size = sizes.get(item.name, item.shape[0])
        share, at = w[at : at + size], at + size
        if item.is_camera:
            scale, offset = normalizer(item.name, 1)
            weights |= {f"obs.{item.name}_scale": scale, f"obs.{item.name}_offset": offset}
            of_cameras.append(share)
        else:
            scale, offset = normalizer(item.name, size)
            entries[item.name] = f"obs.{item.name}_w"
            weights[entries[item.name]] = scale[:, None] * share
            b = b + offset @ share
    if at != len(w):
        raise UnsupportedError(f"an obs_encoder that makes {at} numbers where the denoiser takes {len(w)}")
    if of_cameras:
        weights["obs_w"] = torch.cat(of_cameras)
    return ProgramInputs({item.name: (moments, *item.shape) for item in items}, entries, weights, b, networks)
