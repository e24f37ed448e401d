"""RDT as a program: what is done per generation, per step, in a block. Knows nothing of backends.

Language and image tokens do not change in a generation, so their keys (normed) and values are projected once for every
layer: about nine tenths of what the public code computes at every step. Matrices are those of the policy, as they lie in
memory; what is folded (the score's scale, position embeddings, the time's embedding by step) is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockcache.models.program import Ops, Program, Value
from blockcache.models.rdt.denoiser import FRONT
from blockcache.models.rdt.flops import RDTShape

SA, CA, FFN = range(3)
LANGUAGE, IMAGE = range(2)


@dataclass(frozen=True)
class Conditions:
    """One generation's."""

    start: Value  # (B * (3 + T), d) positions, frequency and state; the time is missing
    masked: Value  # (B, 1, d) the action mask's share of the sample's adaptor, with its bias
    acting: Value  # (B, 1, A) the action mask
    hidden: Value  # (B, 1, 1, L) added to the scores of language tokens: 0, or far below all others
    keys: list[Value]  # by layer, (B, H, d / H, S)
    values: list[Value]  # by layer, (B, H, S, d / H)


@dataclass(frozen=True, eq=False, kw_only=True)
class RDTProgram(Program):
    """`adaptors` says how many matrices each of the adaptors (language, image, state) has, `norm` and `norm_eps` how norms
    divide."""

    shape: RDTShape
    heads: int
    norm: str
    norm_eps: float
    adaptors: tuple[int, int, int]

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def size(self) -> int:
        """Numbers of a head."""
        return self.width // self.heads

    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        tokens = self.adapted(ops, obs)
        sources = [tokens[layer % 2] for layer in range(self.shape.layers)]
        keys = [self.keys(ops, layer, source) for layer, source in enumerate(sources)]
        return self.around(ops, obs, keys, [self.values(ops, layer, source) for layer, source in enumerate(sources)])

    def around(self, ops: Ops, obs: Mapping[str, Value], keys: list[Value], values: list[Value]) -> Conditions:
        """All conditions but the language and image tokens."""
        width, horizon = self.width, self.shape.horizon
        mask, state = (ops.reshape(obs[name], (-1, self.action_dim)) for name in ("action_mask", "state_tokens"))
        masked = ops.linear(mask, ops.weight("mask_w"), ops.weight("state_b0"))  # (B, d)
        sensed = self._deeper(ops, "state", 2, ops.add([ops.matmul(state, ops.weight("state_w0")), masked]))
        angles = ops.mul(obs["ctrl_freqs"], ops.weight("frequencies"))  # (B, 128)
        waves = ops.concat([ops.activation(angles, "cos"), ops.activation(angles, "sin")], axis=-1)
        rate = self._linear(ops, "freq_down", ops.activation(self._linear(ops, "freq_up", waves), "silu"))
        rate, sensed, masked = (ops.reshape(item, (-1, 1, width)) for item in (rate, sensed, masked))
        blank, places = ops.mul(rate, ops.weight("zero")), ops.weight("places")
        contents = {0: blank, 1: rate, 2: sensed, FRONT: blank}
        stops = (1, 2, FRONT, FRONT + horizon)
        rows = [
            ops.add([item, ops.slice(places, 1, first, stop)])
            for (first, item), stop in zip(contents.items(), stops, strict=True)
        ]
        seen = ops.reshape(obs["lang_attn_mask"], (-1, 1, 1, self.shape.conditions[LANGUAGE]))
        hidden = ops.add([ops.mul(seen, ops.weight("hide")), ops.weight("hide_all")])
        acting = ops.reshape(mask, (-1, 1, self.action_dim))
        return Conditions(ops.reshape(ops.concat(rows, axis=1), (-1, width)), masked, acting, hidden, keys, values)

    def adapted(self, ops: Ops, obs: Mapping[str, Value]) -> tuple[Value, Value]:
        """Language and image tokens as they are attended to, (B * S, d) each."""
        found = []
        for place, name in enumerate(("lang", "img")):
            tokens = obs[f"{name}_tokens"]
            tokens = ops.reshape(tokens, (-1, self.inputs[f"{name}_tokens"][-1]))
            tokens = self._deeper(ops, name, place, self._linear(ops, name, tokens, 0))
            tokens = ops.reshape(tokens, (-1, self.shape.conditions[place], self.width))
            found.append(ops.reshape(ops.add([tokens, ops.weight(f"{name}_places")]), (-1, self.width)))
        return found[LANGUAGE], found[IMAGE]

    def keys(self, ops: Ops, layer: int, tokens: Value) -> Value:
        keys = self._by_head(ops, self._linear(ops, "key", tokens, layer), f"key_gain{layer}")
        keys = ops.reshape(keys, (-1, self.shape.conditions[layer % 2], self.heads, self.size))
        return ops.transpose(keys, (0, 2, 3, 1))

    def values(self, ops: Ops, layer: int, tokens: Value) -> Value:
        values = self._linear(ops, "value", tokens, layer)
        return self._heads_first(ops, values, self.shape.conditions[layer % 2])

    def enter(self, ops: Ops, x: Value, start: Value, conditions: Any, step: Any) -> Value:
        tokens, horizon, width = self.shape.tokens, self.shape.horizon, self.width
        actions = ops.reshape(ops.matmul(x, ops.weight("state_w0")), (-1, horizon, width))
        actions = ops.reshape(ops.add([actions, conditions.masked]), (-1, width))
        actions = ops.reshape(self._deeper(ops, "state", 2, actions), (-1, horizon, width))
        places = ops.reshape(start, (-1, tokens, width))
        front = ops.add([ops.slice(places, 1, 0, FRONT), ops.row("time", step)])
        behind = ops.add([ops.slice(places, 1, FRONT, tokens), actions])
        return ops.reshape(ops.concat([front, behind], axis=1), (-1, width))

    def residual(self, ops: Ops, block: int, stream: Value, conditions: Any, step: Any) -> Value:
        layer, kind = divmod(block, 3)
        normed = self._normed(ops, stream, self.width, f"norm{1 + kind}_gain{layer}")
        if kind == SA:
            return self._self_attention(ops, layer, normed)
        if kind == CA:
            hidden = conditions.hidden if layer % 2 == LANGUAGE else None
            return self._cross_attention(ops, layer, normed, *self.attended(ops, layer, conditions), hidden)
        return self._linear(ops, "down", ops.activation(self._linear(ops, "up", normed, layer), "gelu_tanh"), layer)

    def attended(self, ops: Ops, layer: int, conditions: Any) -> tuple[Value, Value]:
        """A layer's keys and values of language or image tokens."""
        return conditions.keys[layer], conditions.values[layer]

    def _self_attention(self, ops: Ops, layer: int, normed: Value) -> Value:
        q, k, v = ops.split(self._linear(ops, "qkv", normed, layer), 3, -1)
        q, k = (self._by_head(ops, item, f"own_{name}_gain{layer}") for item, name in ((q, "query"), (k, "key")))
        q, k, v = (ops.reshape(item, (-1, self.shape.tokens, self.width)) for item in (q, k, v))
        attended = ops.attention(q, k, v, self.heads)
        return self._linear(ops, "out", ops.reshape(attended, (-1, self.width)), layer)

    def _cross_attention(
        self, ops: Ops, layer: int, normed: Value, keys: Value, values: Value, hidden: Value | None
    ) -> Value:
        query = self._by_head(ops, self._linear(ops, "query", normed, layer), f"query_gain{layer}")
        attended = ops.attend(self._heads_first(ops, query, self.shape.tokens), keys, values, hidden)
        attended = ops.reshape(ops.transpose(attended, (0, 2, 1, 3)), (-1, self.width))
        return self._linear(ops, "cross", attended, layer)

    def leave(self, ops: Ops, stream: Value, conditions: Any, step: Any) -> Value:
        places = ops.reshape(stream, (-1, self.shape.tokens, self.width))
        actions = ops.reshape(ops.slice(places, 1, FRONT, self.shape.tokens), (-1, self.width))
        normed = self._normed(ops, actions, self.width, "final_gain")
        return self._linear(ops, "final_down", ops.activation(self._linear(ops, "final_up", normed), "gelu_tanh"))

    def finish(self, ops: Ops, sample: Value) -> Value:
        return ops.reshape(sample, (-1, self.shape.horizon, self.action_dim))

    def select(self, ops: Ops, actions: Value, conditions: Any) -> Value:
        return ops.mul(actions, conditions.acting)

    def _deeper(self, ops: Ops, name: str, place: int, x: Value) -> Value:
        """An adaptor behind its first matrix."""
        for index in range(1, self.adaptors[place]):
            x = self._linear(ops, name, ops.activation(x, "gelu_tanh"), index)
        return x

    def _by_head(self, ops: Ops, x: Value, gain: str) -> Value:
        """Normed head by head: (rows, d) -> (rows, H, d / H)."""
        return self._normed(ops, ops.reshape(x, (-1, self.heads, self.size)), self.size, gain)

    def _normed(self, ops: Ops, x: Value, width: int, gain: str) -> Value:
        return ops.mul(ops.scale_norm(x, width, self.norm_eps, self.norm == "std"), ops.weight(gain))

    def _heads_first(self, ops: Ops, x: Value, tokens: int) -> Value:
        """-> (B, H, tokens, d / H)."""
        return ops.transpose(ops.reshape(x, (-1, tokens, self.heads, self.size)), (0, 2, 1, 3))

    def _linear(self, ops: Ops, name: str, x: Value, index: int | str = "") -> Value:
        return ops.linear(x, ops.weight(f"{name}_w{index}"), ops.weight(f"{name}_b{index}"))
