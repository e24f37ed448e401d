"""DP-T's decoder form as a program: what is done per generation, per step, in a block. Knows nothing of backends.

Cross-attention has few keys, so queries and keys meet in one matrix: `norm(x) Wq k` is `norm(x) (Wq k)`, and `Wq k` for
the observations' keys is computed once per generation; likewise values and the output projection. The time token's share
of it depends on the step alone and comes from a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockcache.models.dpt.cameras import CameraNetwork
from blockcache.models.flops import DPTShape, folded_blocks, folded_every_step
from blockcache.models.program import Ops, Program, Value

SA, CA, FFN = range(3)
PER_LAYER = 3


@dataclass(frozen=True)
class Conditions:
    """One generation's. Per layer: scores = norm(x) @ w + b, residual = softmax(scores) @ v, the mask in b."""

    start: Value  # (rows, d) position embeddings
    w: list[Value]  # (B, d, H * S) each
    b: list[Value]  # (B, T, H * S)
    v: list[Value]  # (B, H * S, d)


@dataclass(frozen=True, eq=False, kw_only=True)
class DPTProgram(Program):
    """`entries` names the matrix that each part of an observation is multiplied by, `networks` are its cameras' networks."""

    shape: DPTShape
    heads: int
    norm_eps: float
    self_masked: bool
    entries: Mapping[str, str]
    networks: tuple[CameraNetwork, ...]

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def slots(self) -> int:
        """S: the time token and the observations."""
        return self.shape.cond_tokens

    @property
    def columns(self) -> int:
        """One for each head and condition token, head by head."""
        return self.heads * self.slots

    @property
    def encoder_flops(self) -> int:
        """FLOPs of the cameras' networks in one generation."""
        return (self.slots - 1) * sum(network.flops for network in self.networks)

    def see(self, ops: Ops, frames: Mapping[str, Value]) -> Value:
        return ops.concat([network.see(ops, frames[network.camera]) for network in self.networks], axis=-1)

    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        tokens = self.encode(ops, self.embed(ops, obs))
        width, layers, columns = self.width, self.layers, self.columns
        # the query's bias rides along as one more row
        scores = ops.transpose(self._through(ops, tokens, "key", width + 1), (0, 2, 4, 1, 3))
        scores = ops.reshape(scores, (layers, -1, width + 1, columns))
        w = ops.slice(scores, 2, 0, width)
        b = ops.add([ops.slice(scores, 2, width, width + 1), ops.weight("memory_mask")])  # (L, B, T, H * S)
        v = ops.transpose(self._through(ops, tokens, "value", width), (0, 2, 1, 3, 4))
        v = ops.add([ops.reshape(v, (layers, -1, columns, width)), ops.weight("cross_b")])
        split = [
            ops.split(ops.reshape(value, (-1, *shape)), layers, 0)
            for value, shape in ((w, (width, columns)), (b, (self.tokens, columns)), (v, (columns, width)))
        ]
        return Conditions(ops.per_sample(ops.weight("positions")), *split)

    def embed(self, ops: Ops, obs: Mapping[str, Value]) -> Value:
        """The observation tokens before their encoding, (B * n_obs, d)."""
        parts = [ops.matmul(obs[name], ops.weight(matrix)) for name, matrix in self.entries.items()]
        tokens = ops.add([*parts, ops.weight("obs_b")])
        return ops.reshape(tokens, (-1, self.width))

    def encode(self, ops: Ops, tokens: Value) -> Value:
        """The condition encoder, token by token."""
        return self.linear(ops, "encode_down", ops.activation(self.linear(ops, "encode_up", tokens), "mish"))

    def _through(self, ops: Ops, tokens: Value, name: str, outputs: int) -> Value:
        """Encoded tokens to keys (or values) and on through a folded matrix: (L, H, B, S, outputs), the time's empty."""
        groups, observed = self.layers * self.heads, self.slots - 1
        heads = ops.reshape(self.linear(ops, name, tokens), (-1, groups, self.width // self.heads))
        product = ops.grouped(heads, ops.weight(f"{name}_folded"))
        product = ops.reshape(product, (-1, observed, self.layers, self.heads, outputs))
        return ops.pad(ops.transpose(product, (2, 3, 0, 1, 4)), axis=3, before=1)

    def enter(self, ops: Ops, x: Value, start: Value, conditions: Any, step: Any) -> Value:
        return ops.linear(x, ops.weight("input_w"), start)

    def residual(self, ops: Ops, block: int, stream: Value, conditions: Any, step: Any) -> Value:
        layer, kind = divmod(block, PER_LAYER)
        if kind == CA:
            return self.cross_attention(ops, layer, stream, conditions, step)
        normed = self._norm(ops, stream)
        if kind == SA:
            return self._self_attention(ops, layer, normed)
        return self.linear(ops, "down", ops.activation(self.linear(ops, "up", normed, layer), "gelu"), layer)

    def _self_attention(self, ops: Ops, layer: int, normed: Value) -> Value:
        qkv = ops.reshape(self.linear(ops, "qkv", normed, layer), (-1, self.tokens, 3 * self.width))
        q, k, v = ops.split(qkv, 3, -1)
        attended = ops.attention(q, k, v, self.heads, "self_mask" if self.self_masked else None, self.causal)
        return self.linear(ops, "out", ops.reshape(attended, (-1, self.width)), layer)

    def cross_attention(self, ops: Ops, layer: int, stream: Value, conditions: Any, step: Any) -> Value:
        w, b, v = (ops.row(f"time_{name}", step, layer) for name in "wbv")
        w, v = ops.add([conditions.w[layer], w]), ops.add([conditions.v[layer], v])
        scores = ops.matmul(ops.reshape(self._norm(ops, stream), (-1, self.tokens, self.width)), w)
        scores = ops.reshape(ops.add([scores, conditions.b[layer], b]), (-1, self.slots))
        shares = ops.reshape(ops.softmax(scores), (-1, self.tokens, self.columns))
        return ops.reshape(ops.matmul(shares, v), (-1, self.width))

    def _norm(self, ops: Ops, stream: Value) -> Value:
        return ops.layer_norm(stream, self.width, self.norm_eps)

    def leave(self, ops: Ops, stream: Value, conditions: Any, step: Any) -> Value:
        return self.linear(ops, "head", self._norm(ops, stream))

    def finish(self, ops: Ops, sample: Value) -> Value:
        actions = ops.reshape(sample, (-1, self.tokens, self.chunk[1]))
        return ops.add([ops.mul(actions, ops.weight("action_scale")), ops.weight("action_offset")])

    def cut(self, tokens: int) -> DPTProgram:
        kept = {
            "positions": self.weights["positions"][:tokens],
            "memory_mask": self.weights["memory_mask"][:, :, :tokens],
            "self_mask": self.weights["self_mask"][:tokens, :tokens],
        }
        shape = replace(self.shape, tokens=tokens)
        return replace(
            self,
            whole=False,
            tokens=tokens,
            shape=shape,
            blocks=folded_blocks(shape, self.heads),
            every_step=folded_every_step(shape),
            weights={**self.weights, **{name: tensor.contiguous() for name, tensor in kept.items()}},
        )
