"""CLIP's vision encoder as operations of a program, folded from its modules: frames in, the class token out.

Every LayerNorm's gain and bias go into the matrix behind it, the attention scale into the queries; `x sigmoid(1.702 x)` is
SiLU of `1.702 x` over 1.702, so the factors go into the matrices around it. Scaling a frame is a product with one matrix on
each side. Of the last layer only the class token is computed. `with_encoders` makes a DiT's program begin at the frames.
Knows nothing of backends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.models.dit.clip import CHANNELS, FEATURE, ClipConfig
from blockcache.models.dit.policy import DiTPolicy
from blockcache.models.dit.program import DiTProgram, input_normalizer
from blockcache.models.flops import attention, feed_forward, linear
from blockcache.models.folding import after_norm, cast, double, named, scaled_queries, signature
from blockcache.models.folding import linear as matrix
from blockcache.models.normalizer import ShiftedField
from blockcache.models.program import Ops, UnsupportedError, Value

_QUICK_GELU = 1.702
_GIVEN = "what the policy's text encoder makes of the words: policy.language_feature(tokens, mask), once for a task"


@dataclass(frozen=True)
class VisionTower:
    """A camera and its encoder; several cameras may have the same `name`, which is that of the encoder's weights.

    frame: height and width of what the camera gives.
    corner: top and left of what is looked at, where frames are not scaled; None where they are.
    side: its height and width.
    places: tokens, the class token among them.
    """

    camera: str
    name: str
    frame: tuple[int, int]
    corner: tuple[int, int] | None
    side: int
    patch: int
    places: int
    width: int
    heads: int
    hidden: int
    layers: int
    norm_eps: float

    def see(self, ops: Ops, frames: Value) -> Value:
        """Frames from 0 to 1, (n, 3, height, width) -> (n, width)."""
        x = self._patches(ops, self._looked_at(ops, frames))  # (n, places - 1, width)
        x = ops.pad(
            ops.reshape(x, (1, 1, -1, self.places - 1, self.width)), axis=3, before=1
        )  # the class token's place
        x = ops.add([ops.reshape(x, (-1, self.places, self.width)), ops.weight(f"{self.name}_places")])
        x = ops.mul(ops.layer_norm(x, self.width, self.norm_eps), ops.weight(f"{self.name}_first_gain"))
        stream = ops.add([x, ops.weight(f"{self.name}_first_bias")])  # (n, places, width)
        for layer in range(self.layers):
            stream = self._layer(ops, layer, stream)
        return ops.reshape(stream, (-1, self.width))

    def _looked_at(self, ops: Ops, frames: Value) -> Value:
        """Normalised, then scaled and cut: (n, 3, side, side)."""
        shift, scale, base = (ops.weight(f"obs.{self.camera}_{part}") for part in ("shift", "scale", "base"))
        x = ops.add([ops.mul(ops.add([frames, shift]), scale), base])
        if self.corner is None:
            # the matrices on the right: on the left of no frames at all ONNX Runtime refuses one
            across = ops.transpose(ops.matmul(x, ops.weight(f"{self.name}_columns")), (0, 1, 3, 2))
            return ops.transpose(ops.matmul(across, ops.weight(f"{self.name}_rows")), (0, 1, 3, 2))
        for axis, start, whole in zip((2, 3), self.corner, self.frame, strict=True):
            x = x if self.side == whole else ops.slice(x, axis, start, start + self.side)
        return x

    def _patches(self, ops: Ops, frames: Value) -> Value:
        maps = ops.conv(frames, ops.weight(f"{self.name}_patch_w"), self.patch, 0)
        return ops.transpose(ops.reshape(maps, (-1, self.width, self.places - 1)), (0, 2, 1))

    def _layer(self, ops: Ops, layer: int, stream: Value) -> Value:
        """(n, places, width) -> the same; of the last layer (n, 1, width)."""
        qkv = self._linear(ops, layer, "qkv", self._normed(ops, stream))
        size, tokens = self.width // self.heads, self.places
        heads = ops.transpose(ops.reshape(qkv, (-1, tokens, 3 * self.heads, size)), (0, 2, 1, 3))
        q, k, v = ops.split(heads, 3, 1)  # (n, heads, places, size) each
        if layer == self.layers - 1:
            q, stream, tokens = ops.slice(q, 2, 0, 1), ops.slice(stream, 1, 0, 1), 1
        # not `attention`: ONNX Runtime's operator refuses a batch of no frames, which there is where all are known
        attended = ops.transpose(ops.attend(q, ops.transpose(k, (0, 1, 3, 2)), v), (0, 2, 1, 3))
        attended = ops.reshape(attended, (-1, self.width))
        stream = self._add(ops, stream, self._linear(ops, layer, "out", attended), tokens)
        hidden = ops.activation(self._linear(ops, layer, "up", self._normed(ops, stream)), "silu")
        return self._add(ops, stream, self._linear(ops, layer, "down", hidden), tokens)

    def _add(self, ops: Ops, stream: Value, rows: Value, tokens: int) -> Value:
        return ops.add([stream, ops.reshape(rows, (-1, tokens, self.width))])

    def _normed(self, ops: Ops, stream: Value) -> Value:
        return ops.reshape(ops.layer_norm(stream, self.width, self.norm_eps), (-1, self.width))

    def _linear(self, ops: Ops, layer: int, name: str, rows: Value) -> Value:
        return ops.linear(rows, *(ops.weight(f"{self.name}_{name}_{part}{layer}") for part in "wb"))

    @property
    def flops(self) -> int:
        """Of one frame."""
        width, places = self.width, self.places
        scaled = linear(CHANNELS * self.frame[0], self.frame[1], self.side)
        scaled += linear(CHANNELS * self.side, self.frame[0], self.side)
        patches = linear(places - 1, CHANNELS * self.patch**2, width)
        whole = attention(places, places, width) + feed_forward(places, width, self.hidden)
        last = linear(places, width, 3 * width) + 2 * linear(1, width, places) + linear(1, width, width)
        last += feed_forward(1, width, self.hidden)
        return (scaled if self.corner is None else 0) + patches + (self.layers - 1) * whole + last


def fold_vision(
    camera: str, name: str, config: ClipConfig, module: nn.Module, field: ShiftedField
) -> tuple[VisionTower, dict[str, Tensor]]:
    """A camera's encoder and its weights, in float64, or what about it cannot be.

    Args:
        camera: the input.
        name: of the encoder; cameras that share one share its weights.
        config: frames, scaling, and the encoder's sizes.
        module: CLIP's vision transformer, as `transformers` builds it.
        field: how the camera's frames are normalised, channel by channel.
    """
    model: Any = module
    tower, frame, looked_at = config.vision, config.frame, config.looked_at
    assert tower is not None
    assert frame is not None
    assert looked_at is not None
    norms = [model.pre_layrnorm, *(getattr(layer, f"layer_norm{n}") for layer in model.encoder.layers for n in (1, 2))]
    if len({norm.eps for norm in norms}) > 1:
        raise UnsupportedError("a vision encoder whose norms have different eps")
    resized = config.resize is not None and tuple(config.resize) != tuple(frame)
    room = config.resize if resized and config.resize is not None else frame
    top, left = (round((whole - kept) / 2) for whole, kept in zip(room, looked_at, strict=True))
    side = looked_at[0]
    weights = {
        f"obs.{camera}_shift": -double(field.shift).view(1, -1, 1, 1),
        f"obs.{camera}_scale": double(field.scale).view(1, -1, 1, 1),
        f"obs.{camera}_base": double(field.base).view(1, -1, 1, 1),
        f"{name}_patch_w": double(model.embeddings.patch_embedding.weight),
        f"{name}_places": double(model.embeddings.position_embedding.weight)[None].clone(),
        f"{name}_first_gain": double(model.pre_layrnorm.weight),
        f"{name}_first_bias": double(model.pre_layrnorm.bias),
    }
    weights[f"{name}_places"][0, 0] += double(model.embeddings.class_embedding).flatten()
    if resized:
        weights[f"{name}_rows"] = _scaling(frame[0], room[0])[top : top + side].T
        weights[f"{name}_columns"] = _scaling(frame[1], room[1])[left : left + side].T
    for index, layer in enumerate(model.encoder.layers):
        own = layer.self_attn
        parts = [matrix(getattr(own, f"{which}_proj")) for which in "qkv"]
        joint = torch.cat([w for w, _ in parts], dim=1), torch.cat([b for _, b in parts])
        first, second = ((double(norm.weight), double(norm.bias)) for norm in (layer.layer_norm1, layer.layer_norm2))
        up_w, up_b = after_norm(*second, matrix(layer.mlp.fc1))
        down_w, down_b = matrix(layer.mlp.fc2)
        pairs = {
            f"{name}_qkv": after_norm(*first, scaled_queries(joint, tower.width, tower.heads)),
            f"{name}_out": matrix(own.out_proj),
            f"{name}_up": (_QUICK_GELU * up_w, _QUICK_GELU * up_b),
            f"{name}_down": (down_w / _QUICK_GELU, down_b),
        }
        weights |= named(pairs, index)
    found = VisionTower(
        camera=camera,
        name=name,
        frame=(frame[0], frame[1]),
        corner=None if resized else (top, left),
        side=side,
        patch=config.patch,
        places=tower.places,
        width=tower.width,
        heads=tower.heads,
        hidden=tower.hidden,
        layers=tower.layers,
        norm_eps=float(norms[0].eps),
    )
    return found, weights


def _scaling(before: int, after: int) -> Tensor:
    """(after, before): the matrix by which torch scales one side of a frame, bilinearly and with antialiasing."""
    columns = torch.eye(before, dtype=torch.float64)[None, None]
    return F.interpolate(columns, size=[after, before], mode="bilinear", antialias=True, align_corners=False)[0, 0]


def with_encoders(program: DiTProgram, policy: DiTPolicy, said: Tensor | None) -> DiTProgram:
    """A program that begins behind CLIP, from the observation on: frames go in, and the feature of the words, or none.

    The words are the same at all moments, so their share of the modulation is one product, and a constant where they are.

    Args:
        program: of the policy, beginning at its conditioning vector.
        policy: has the encoders.
        said: what the words of the one task say, (1, hidden_dim); without it `FEATURE` is an input.
    """
    config, encoder = policy.config, policy.observation_encoder
    assert config.encoder is not None
    assert encoder is not None
    shapes, fields = config.inputs, {name: policy.normalizer.field(name) for name in (*config.state, *config.vectors)}
    towers: list[VisionTower] = []
    weights: dict[str, Tensor] = {}
    for place, camera in enumerate(config.cameras):
        name = "vision0" if config.encoder.shared else f"vision{place}"
        network: Any = encoder.network(place)
        tower, own = fold_vision(camera, name, config.encoder, network.model, policy.normalizer.field(camera))
        towers.append(tower)
        weights |= own
    for name, field in fields.items():
        weights |= input_normalizer(name, field)
    moments, kept = config.n_obs_steps, sum(config.state.values()) + config.encoder.features
    whole, bias = (double(program.weights[f"condition_{part}"]) for part in "wb")
    encoded = moments * (kept + config.hidden_dim)  # rows of what has moments; vectors behind them
    by_moment = whole[:encoded].view(moments, kept + config.hidden_dim, -1)
    rows = [by_moment[:, :kept].flatten(0, 1), whole[encoded:]]
    words = by_moment[:, kept:].sum(dim=0)  # (hidden_dim, L * 6 * d)
    inputs = {name: shapes[name] for name in (*config.state, *config.cameras, *config.vectors)}
    if said is None:
        rows.append(words)
        inputs[FEATURE] = (config.hidden_dim,)
    else:
        bias = bias + F.silu(double(said))[0] @ words
    weights |= {"condition_w": torch.cat(rows), "condition_b": bias}
    seen = moments * sum(tower.flops for tower in towers)
    return replace(
        program,
        inputs=inputs,
        cameras=config.cameras,
        features=config.encoder.features,
        towers=tuple(towers),
        once=program.shape.modulation(len(weights["condition_w"])) + seen,
        weights={**program.weights, **{name: cast(tensor, program.like) for name, tensor in weights.items()}},
        outside={FEATURE: _GIVEN} if said is None else {},
        signature=signature((program.signature, inputs, towers), said),
    )
