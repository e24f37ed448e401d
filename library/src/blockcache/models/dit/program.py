"""An adaLN DiT as a program: what is done per generation, per step, in a block; and how a policy is folded into it.

A layer's modulation is linear in SiLU of [time, conditions]: the conditions' half is computed once per generation, the
time's half comes from a table. A block's gate multiplies what was computed or kept, so that a kept block follows the
present gate. Folding is exact algebra in float64, done once: the attention scale goes into the query matrix, position
embeddings into the first projection's bias, the 1 of `1 + scale` into the modulation's bias. Knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.models.dit.denoiser import CHUNKS, DiTShape, attention_of, embed_time
from blockcache.models.folding import cast, double, linear, named, refuse, scaled_queries, signature
from blockcache.models.normalizer import ShiftedField
from blockcache.models.program import Ops, Program, StepTable, UnsupportedError, Value

if TYPE_CHECKING:
    from blockcache.models.dit.vision import VisionTower

SA, FFN = range(2)
PER_LAYER = 2
CONDITIONING = "conditioning"
"""The input of a program that begins behind an encoder: the conditioning vector itself."""
_SCALES = (1, 4)  # which of a layer's six chunks have a 1 added to them


@dataclass(frozen=True)
class Conditions:
    start: Value  # (rows, d) position embeddings and the first projection's bias
    modulation: Value  # (B, L * 6, d) the conditions' half
    now: tuple[Value, ...] = ()  # this step's shifts, 1 + scales and gates, (B, 1, d) each


@dataclass(frozen=True, eq=False, kw_only=True)
class DiTProgram(Program):
    """Its inputs are those of the observation, (moments, numbers) or (numbers,), or behind an encoder `CONDITIONING`; with
    `towers`, the encoders of its cameras, also frames, (moments, channels, height, width)."""

    shape: DiTShape
    heads: int
    norm_eps: float
    rotary: bool
    towers: tuple[VisionTower, ...] = ()

    @property
    def width(self) -> int:
        return self.shape.width

    def see(self, ops: Ops, frames: Mapping[str, Value]) -> Value:
        return ops.concat([tower.see(ops, frames[tower.camera]) for tower in self.towers], axis=-1)

    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        return Conditions(ops.per_sample(ops.weight("start")), self.modulate(ops, self.activated(ops, obs)))

    def activated(self, ops: Ops, obs: Mapping[str, Value]) -> Value:
        """SiLU of the conditioning vector, (B, C)."""
        if CONDITIONING in self.inputs:
            return ops.activation(obs[CONDITIONING], "silu")
        shapes = {name: shape for name, shape in self.inputs.items() if len(shape) == 2}
        moments = [self._normalized(ops, name, obs[name]) for name in shapes]  # (B, n_obs, numbers) each
        moments += [obs["features"]] if self.cameras else []
        steps, numbers = next(iter(shapes.values()))[0], sum(size for _, size in shapes.values()) + self.features
        vector = ops.reshape(ops.concat(moments, axis=-1), (-1, steps * numbers))
        once = [self._normalized(ops, name, obs[name]) for name, shape in self.inputs.items() if len(shape) == 1]
        return ops.activation(ops.concat([vector, *once], axis=-1), "silu")

    def _normalized(self, ops: Ops, name: str, value: Value) -> Value:
        if name in self.outside:
            return value
        shifted = ops.add([value, ops.weight(f"input_shift_{name}")])
        return ops.add([ops.mul(shifted, ops.weight(f"input_scale_{name}")), ops.weight(f"input_base_{name}")])

    def modulate(self, ops: Ops, activated: Value) -> Value:
        """The conditions' half of all layers' modulation, (B, L * 6, d)."""
        return ops.reshape(self.linear(ops, "condition", activated), (-1, self.shape.layers * CHUNKS, self.width))

    def begin(self, ops: Ops, conditions: Any, step: Any) -> Any:
        both = ops.add([conditions.modulation, self.time(ops, step)])
        return replace(conditions, now=tuple(ops.split(both, self.shape.layers * CHUNKS, 1)))

    def time(self, ops: Ops, step: Any) -> Value:
        """The time's half of all layers' modulation, (1, L * 6, d)."""
        return ops.row("time", step)

    def enter(self, ops: Ops, x: Value, start: Value, conditions: Any, step: Any) -> Value:
        return ops.linear(x, ops.weight("input_w"), start)

    def residual(self, ops: Ops, block: int, stream: Value, conditions: Any, step: Any) -> Value:
        layer, kind = divmod(block, PER_LAYER)
        shift, scale, _ = self._chunks(block, conditions)
        normed = ops.layer_norm(stream, self.width, self.norm_eps)
        h = ops.reshape(normed, (-1, self.tokens, self.width))
        h = ops.reshape(ops.add([ops.mul(h, scale), shift]), (-1, self.width))
        if kind == SA:
            return self._attention(ops, layer, h)
        return self.linear(ops, "down", ops.activation(self.linear(ops, "up", h, layer), "gelu_tanh"), layer)

    def _attention(self, ops: Ops, layer: int, h: Value) -> Value:
        both = self.linear(ops, "qk", h, layer)  # (rows, 2 * d): queries and keys
        both = self._turned(ops, both) if self.rotary else ops.reshape(both, (-1, self.tokens, 2 * self.width))
        values = ops.reshape(self.linear(ops, "v", h, layer), (-1, self.tokens, self.width))
        queries, keys = ops.split(both, 2, -1)
        attended = ops.attention(queries, keys, values, self.heads)
        return self.linear(ops, "out", ops.reshape(attended, (-1, self.width)), layer)

    def _turned(self, ops: Ops, both: Value) -> Value:
        """Queries and keys, (B, T, 2 * d), behind their rotation: each number times its cosine, and what stands half a head
        further on or back times the sine, whose sign is in the weight."""
        half = self.width // self.heads // 2
        heads = ops.reshape(both, (-1, 2 * self.heads, 2, half))
        swapped = ops.concat(ops.split(heads, 2, 2)[::-1], axis=2)
        shape = (-1, self.tokens, 2 * self.width)
        pairs = ((both, "cos"), (swapped, "sin"))
        return ops.add([ops.mul(ops.reshape(value, shape), ops.weight(name)) for value, name in pairs])

    def gate(self, ops: Ops, block: int, conditions: Any, step: Any) -> Value:
        every_token = ops.mul(self._chunks(block, conditions)[2], ops.weight("every_token"))
        return ops.reshape(every_token, (-1, self.width))

    def _chunks(self, block: int, conditions: Any) -> tuple[Value, Value, Value]:
        """This step's shift, scale and gate of a block."""
        layer, kind = divmod(block, PER_LAYER)
        shift, scale, gate = conditions.now[layer * CHUNKS + 3 * kind :][:3]
        return shift, scale, gate

    def leave(self, ops: Ops, stream: Value, conditions: Any, step: Any) -> Value:
        return self.linear(ops, "output", stream)

    def finish(self, ops: Ops, sample: Value) -> Value:
        actions = ops.reshape(sample, (-1, self.tokens, self.chunk[1]))
        based = ops.mul(ops.add([actions, ops.weight("action_base")]), ops.weight("action_scale"))
        return ops.add([based, ops.weight("action_shift")])


# -- folding


def fold(port: Any, shape: DiTShape) -> DiTProgram:
    """Fold the policy behind a port with `normalizer_field`, or say what about it cannot be."""
    denoiser, heads = port.adapter.denoiser, port.adapter.widths["heads"]
    layers = list(denoiser.transformer_blocks)
    require_supported(denoiser, layers)
    like = denoiser.input_proj.weight
    inputs = {CONDITIONING: (shape.cond_dim,)} if port.begins_after_encoder else dict(port.inputs)
    features = time_features(port.timesteps, denoiser.time_mlp)  # (K, time_dim), behind their SiLU
    rotation = _rotation(layers, shape, heads)
    time_w, condition_w, condition_b = modulation(layers, shape)
    input_w, input_b = linear(denoiser.input_proj)
    start = input_b.expand(shape.tokens, -1)
    if getattr(denoiser, "pos_embedding", None) is not None:
        start = start + double(denoiser.pos_embedding)[0, : shape.tokens]
    action = port.normalizer_field("action")
    weights = {
        "start": start,
        "input_w": input_w,
        **named({"output": linear(denoiser.output_proj)}),
        "condition_w": condition_w,
        "condition_b": condition_b,
        "every_token": torch.ones(1, shape.tokens, 1),
        **rotation,
        "action_base": -double(action.base),
        "action_scale": 1.0 / double(action.scale),
        "action_shift": double(action.shift),
    }
    for name in () if port.begins_after_encoder else inputs:
        weights |= input_normalizer(name, port.normalizer_field(name))
    for index, layer in enumerate(layers):
        weights |= _layer(layer, index, shape.width, heads)
    table = (features @ time_w).view(len(features), 1, shape.layers * CHUNKS, shape.width)
    eps = float(layers[0].norm1.eps)
    return DiTProgram(
        inputs=inputs,
        chunk=(shape.tokens, shape.action_dim),
        tokens=shape.tokens,
        executed=port.executed,
        action_dim=shape.action_dim,
        blocks=shape.blocks,
        once=shape.modulation(shape.cond_dim),
        every_step=shape.ends,
        weights={name: cast(tensor, like) for name, tensor in weights.items()},
        tables={"time": StepTable(cast(table, like), (1, shape.layers * CHUNKS, shape.width))},
        gated=True,
        signature=signature((eps, inputs), features, *rotation.values()),
        shape=shape,
        heads=heads,
        norm_eps=eps,
        rotary=bool(rotation),
    )


def input_normalizer(name: str, field: ShiftedField) -> dict[str, Tensor]:
    """What an input is shifted, scaled and shifted by."""
    parts = {"shift": -double(field.shift), "scale": double(field.scale), "base": double(field.base)}
    return {f"input_{part}_{name}": value for part, value in parts.items()}


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
    """SiLU of the time's features at all steps, (K, time_dim), computed as the policy's own loop does it.

    Args:
        timesteps: as the denoiser is given them, in execution order.
        time_mlp: the denoiser's embedding of the time.
    """
    times = torch.tensor(timesteps, dtype=torch.float32, device=next(time_mlp.parameters()).device)
    with torch.no_grad():
        return F.silu(embed_time(time_mlp, times).to(torch.float64))


def modulation(layers: list[Any], shape: DiTShape) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices of the time (time_dim, L * 6 * d) and of the conditions (C, L * 6 * d), and the bias of both.

    Args:
        layers: the denoiser's, each with its `adaLN_modulation`.
        shape: the sizes of the denoiser.
    """
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
    return named(pairs, index)


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
