"""An adaLN DiT as a program: what is done per generation, per step, in a block. Knows nothing of backends.

A layer's modulation is linear in SiLU of [time, conditions]: the conditions' half is computed once per generation, the
time's half comes from a table. A block's gate multiplies what was computed or kept, so that a kept block follows the
present gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockcache.models.dit.flops import CHUNKS, DiTShape
from blockcache.models.program import Ops, Program, Value

SA, FFN = range(2)
PER_LAYER = 2
CONDITIONING = "conditioning"
"""The input of a program that begins behind an encoder: the conditioning vector itself."""


@dataclass(frozen=True)
class Conditions:
    start: Value  # (rows, d) position embeddings and the first projection's bias
    modulation: Value  # (B, L * 6, d) the conditions' half
    now: tuple[
        Value, ...
    ] = ()  # this step's shifts, scales (with the 1 that is added to them) and gates, (B, 1, d) each


@dataclass(frozen=True, eq=False, kw_only=True)
class DiTProgram(Program):
    """`moments` names the inputs with a moment in front, `vectors` those without, in the conditioning vector's order; behind
    an encoder there is neither."""

    shape: DiTShape
    heads: int
    norm_eps: float
    rotary: bool
    moments: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return self.shape.width

    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        return Conditions(ops.per_sample(ops.weight("start")), self.modulate(ops, self.activated(ops, obs)))

    def activated(self, ops: Ops, obs: Mapping[str, Value]) -> Value:
        """SiLU of the conditioning vector, (B, C)."""
        if CONDITIONING in self.inputs:
            return ops.activation(obs[CONDITIONING], "silu")
        parts = [self._normalized(ops, name, obs[name]) for name in self.moments]  # (B, n_obs, numbers) each
        steps = self.inputs[self.moments[0]][0]
        numbers = sum(self.inputs[name][1] for name in self.moments)
        vector = ops.reshape(ops.concat(parts, axis=-1), (-1, steps * numbers))
        once = [self._normalized(ops, name, obs[name]) for name in self.vectors]
        return ops.activation(ops.concat([vector, *once], axis=-1), "silu")

    def _normalized(self, ops: Ops, name: str, value: Value) -> Value:
        shifted = ops.add([value, ops.weight(f"input_shift_{name}")])
        return ops.add([ops.mul(shifted, ops.weight(f"input_scale_{name}")), ops.weight(f"input_base_{name}")])

    def modulate(self, ops: Ops, activated: Value) -> Value:
        """The conditions' half of all layers' modulation, (B, L * 6, d)."""
        found = ops.linear(activated, ops.weight("condition_w"), ops.weight("condition_b"))
        return ops.reshape(found, (-1, self.shape.layers * CHUNKS, self.width))

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
        return self._linear(ops, layer, "down", ops.activation(self._linear(ops, layer, "up", h), "gelu_tanh"))

    def _attention(self, ops: Ops, layer: int, h: Value) -> Value:
        both = self._linear(ops, layer, "qk", h)  # (rows, 2 * d): queries and keys
        both = self._turned(ops, both) if self.rotary else ops.reshape(both, (-1, self.tokens, 2 * self.width))
        values = ops.reshape(self._linear(ops, layer, "v", h), (-1, self.tokens, self.width))
        queries, keys = ops.split(both, 2, -1)
        attended = ops.attention(queries, keys, values, self.heads)
        return self._linear(ops, layer, "out", ops.reshape(attended, (-1, self.width)))

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
        return ops.linear(stream, ops.weight("output_w"), ops.weight("output_b"))

    def finish(self, ops: Ops, sample: Value) -> Value:
        actions = ops.reshape(sample, (-1, self.tokens, self.chunk[1]))
        based = ops.mul(ops.add([actions, ops.weight("action_base")]), ops.weight("action_scale"))
        return ops.add([based, ops.weight("action_shift")])

    def _linear(self, ops: Ops, layer: int, name: str, x: Value) -> Value:
        return ops.linear(x, ops.weight(f"{name}_w{layer}"), ops.weight(f"{name}_b{layer}"))
