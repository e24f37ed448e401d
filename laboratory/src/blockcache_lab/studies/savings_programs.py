"""DP-T's exact savings switched off, then on one by one, so that each can be measured by itself. For benchmarks and tests.

Every variant computes the same actions. Knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from blockcache.block import CROSS_ATTENTION
from blockcache.models.dpt.program import DPTProgram
from blockcache.models.flops import attention, feed_forward, linear
from blockcache.models.program import Ops, Table, Value


@dataclass(frozen=True)
class _Conditions:
    start: Value
    observed: Value  # (B, S, d): the observation tokens behind an empty place for the time
    tokens: Value = None  # (B * S, d): all condition tokens of the step, encoded


@dataclass(frozen=True, eq=False, kw_only=True)
class PlainProgram(DPTProgram):
    """Cross-attention as written: condition tokens are projected to keys and values at every use, and encoded at every
    step, or once per generation with `encode_once`. `folded` is the program with all its savings."""

    encode_once: bool
    folded: DPTProgram

    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        observed = self.embed(ops, obs)
        observed = self.encode(ops, observed) if self.encode_once else observed
        places = ops.pad(ops.reshape(observed, (1, 1, -1, self.slots - 1, self.width)), axis=3, before=1)
        start = ops.per_sample(ops.weight("positions"))
        return _Conditions(start, ops.reshape(places, (-1, self.slots, self.width)))

    def begin(self, ops: Ops, conditions: Any, step: Any) -> Any:
        time = ops.mul(ops.row("time_encoded" if self.encode_once else "time", step), ops.weight("first_place"))
        tokens = ops.reshape(ops.add([conditions.observed, time]), (-1, self.width))
        return replace(conditions, tokens=tokens if self.encode_once else self.encode(ops, tokens))

    def cross_attention(self, ops: Ops, layer: int, stream: Value, conditions: Any, step: Any) -> Value:
        memory = ops.reshape(self._linear(ops, layer, "memory", conditions.tokens), (-1, self.slots, 2 * self.width))
        query = ops.reshape(self._linear(ops, layer, "query", self._norm(ops, stream)), (-1, self.tokens, self.width))
        keys, values = ops.split(memory, 2, -1)
        attended = ops.attention(query, keys, values, self.heads, "cross_mask")
        return self._linear(ops, layer, "cross", ops.reshape(attended, (-1, self.width)))

    def cut(self, tokens: int) -> DPTProgram:
        each_step, once, _ = self.folded.cut(tokens).without_savings().values()
        return once if self.encode_once else each_step


def without_savings(
    program: DPTProgram, weights: Mapping[str, Tensor], tables: Mapping[str, Table]
) -> dict[str, DPTProgram]:
    """The ladder: the names say what each variant adds to the one before; the last is the program itself."""
    shape, slots = program.shape, program.slots
    first = program.like.new_zeros(1, slots, 1)
    first[:, 0] = 1.0
    own = {
        **{name: tensor for name, tensor in program.weights.items() if not name.startswith(("key_", "value_"))},
        **weights,
        "first_place": first,
        "cross_mask": program.weights["memory_mask"][0, 0, :, :slots].contiguous(),
    }
    cross = attention(shape.tokens, slots, shape.width)
    blocks = tuple(replace(block, cost=cross) if block.kind == CROSS_ATTENTION else block for block in program.blocks)
    kept = {item.name: getattr(program, item.name) for item in fields(program)}
    kept |= {"weights": own, "tables": tables, "blocks": blocks, "folded": program}
    embed = linear(slots - 1, shape.cond_dim, shape.width)
    encoder = feed_forward(slots, shape.width, 4 * shape.width)
    observed = feed_forward(slots - 1, shape.width, 4 * shape.width)
    every_step = program.every_step + encoder
    return {
        "conditions encoded at every step": PlainProgram(
            **kept | {"once": program.encoder_flops + embed, "every_step": every_step, "encode_once": False}
        ),
        "+ conditions encoded once": PlainProgram(
            **kept | {"once": program.encoder_flops + embed + observed, "encode_once": True}
        ),
        "+ keys, values and queries folded once": program,
    }
