"""The exact savings of each family's program switched off, then on one by one, so that each can be measured by itself.

`without_savings` makes the variants of a folded program. Every variant computes the same actions. Knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from blockcache.block import CROSS_ATTENTION
from blockcache.models.dit import program as dit
from blockcache.models.dit.denoiser import CHUNKS
from blockcache.models.dit.program import modulation, time_features
from blockcache.models.dpt.fold import doubles_of, key_value_of, linear_of, query_of, time_tokens
from blockcache.models.dpt.program import DPTProgram
from blockcache.models.flops import attention, feed_forward, linear
from blockcache.models.folding import cast, named
from blockcache.models.port import Port
from blockcache.models.program import Ops, Program, StepTable, Value
from blockcache.models.rdt.program import RDTProgram


def without_savings(port: Port, program: Program) -> Mapping[str, Program]:
    """The program with its exact savings switched off, then on one by one.

    Args:
        port: the policy that the program was folded from.
        program: the folded program, whole or cut.

    Returns:
        Programs by what each adds to the one before; the last is the program itself. Nothing for a family without variants.
    """
    variants: Callable[[Port, Any], Mapping[str, Program]] | None = _VARIANTS.get(type(program))
    return {} if variants is None else variants(port, program)


def _settings(program: Program) -> dict[str, Any]:
    return {item.name: getattr(program, item.name) for item in fields(program)}


# -- DP-T: condition tokens encoded once, keys, values and queries folded


@dataclass(frozen=True)
class _DPTConditions:
    start: Value
    observed: Value  # (B, S, d): the observation tokens behind an empty place for the time
    tokens: Value = None  # (B * S, d): all condition tokens of the step, encoded


@dataclass(frozen=True, eq=False, kw_only=True)
class PlainDPTProgram(DPTProgram):
    """Cross-attention as written: condition tokens are projected to keys and values at every use, and encoded at every
    step, or once per generation with `encode_once`. `folded` is the program with all its savings, of the policy `port`."""

    encode_once: bool
    folded: DPTProgram
    port: Port

    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        observed = self.embed(ops, obs)
        observed = self.encode(ops, observed) if self.encode_once else observed
        places = ops.pad(ops.reshape(observed, (1, 1, -1, self.slots - 1, self.width)), axis=3, before=1)
        start = ops.per_sample(ops.weight("positions"))
        return _DPTConditions(start, ops.reshape(places, (-1, self.slots, self.width)))

    def begin(self, ops: Ops, conditions: Any, step: Any) -> Any:
        time = ops.mul(ops.row("time_encoded" if self.encode_once else "time", step), ops.weight("first_place"))
        tokens = ops.reshape(ops.add([conditions.observed, time]), (-1, self.width))
        return replace(conditions, tokens=tokens if self.encode_once else self.encode(ops, tokens))

    def cross_attention(self, ops: Ops, layer: int, stream: Value, conditions: Any, step: Any) -> Value:
        memory = ops.reshape(self.linear(ops, "memory", conditions.tokens, layer), (-1, self.slots, 2 * self.width))
        query = ops.reshape(self.linear(ops, "query", self._norm(ops, stream), layer), (-1, self.tokens, self.width))
        keys, values = ops.split(memory, 2, -1)
        attended = ops.attention(query, keys, values, self.heads, "cross_mask")
        return self.linear(ops, "cross", ops.reshape(attended, (-1, self.width)), layer)

    def cut(self, tokens: int) -> DPTProgram:
        each_step, once, _ = _dpt_variants(self.port, self.folded.cut(tokens)).values()
        return once if self.encode_once else each_step


def _dpt_variants(port: Port, program: DPTProgram) -> dict[str, DPTProgram]:
    shape, slots, like = program.shape, program.slots, program.like
    weights, tables = _dpt_unfolded(port, program)
    first = like.new_zeros(1, slots, 1)
    first[:, 0] = 1.0
    own = {
        **{name: tensor for name, tensor in program.weights.items() if not name.startswith(("key_", "value_"))},
        **weights,
        "first_place": first,
        "cross_mask": program.weights["memory_mask"][0, 0, :, :slots].contiguous(),
    }
    cross = attention(shape.tokens, slots, shape.width)
    blocks = tuple(replace(block, cost=cross) if block.kind == CROSS_ATTENTION else block for block in program.blocks)
    kept = _settings(program) | {"weights": own, "tables": tables, "blocks": blocks, "folded": program, "port": port}
    embed = linear(slots - 1, shape.cond_dim, shape.width)
    encoder, observed = (feed_forward(tokens, shape.width, 4 * shape.width) for tokens in (slots, slots - 1))
    each_step = {"once": program.encoder_flops + embed, "every_step": program.every_step + encoder}
    return {
        "conditions encoded at every step": PlainDPTProgram(**kept | each_step | {"encode_once": False}),
        "+ conditions encoded once": PlainDPTProgram(
            **kept | {"once": program.encoder_flops + embed + observed, "encode_once": True}
        ),
        "+ keys, values and queries folded once": program,
    }


def _dpt_unfolded(port: Port, program: DPTProgram) -> tuple[dict[str, Tensor], dict[str, StepTable]]:
    """What the variants multiply by instead: each layer's own projections, and the time tokens."""
    double, width, weights = doubles_of(port.policy.state_dict()), program.width, dict[str, Tensor]()
    for index in range(program.layers):
        name = f"decoder.layers.{index}.multihead_attn"
        key_w, key_b, value_w, value_b = key_value_of(double, name, width)
        pairs = {
            "query": query_of(double, index, width, program.heads),
            "cross": linear_of(double, f"{name}.out_proj"),
            "memory": (torch.cat([key_w, value_w], dim=1), torch.cat([key_b, value_b])),
        }
        weights |= named(pairs, index)
    times = dict(zip(("time", "time_encoded"), time_tokens(port, double), strict=True))
    tables = {name: StepTable(cast(time[:, None, None], program.like), (1, 1, width)) for name, time in times.items()}
    return {name: cast(tensor, program.like) for name, tensor in weights.items()}, tables


# -- DiT: the time's half of the modulation from a table, the conditions' half once


@dataclass(frozen=True, eq=False, kw_only=True)
class PlainDiTProgram(dit.DiTProgram):
    """The modulation as the denoiser has it: the conditions' half at every step and, unless `tabled`, the time's too."""

    tabled: bool

    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        return dit.Conditions(ops.per_sample(ops.weight("start")), self.activated(ops, obs))

    def begin(self, ops: Ops, conditions: Any, step: Any) -> Any:
        return super().begin(ops, replace(conditions, modulation=self.modulate(ops, conditions.modulation)), step)

    def time(self, ops: Ops, step: Any) -> Value:
        if self.tabled:
            return super().time(ops, step)
        half = ops.matmul(ops.row("time_features", step), ops.weight("time_w"))
        return ops.reshape(half, (1, self.shape.layers * CHUNKS, self.width))


def _dit_variants(port: Port, program: dit.DiTProgram) -> dict[str, dit.DiTProgram]:
    denoiser: Any = port.adapter.denoiser
    shape, features = program.shape, time_features(port.timesteps, denoiser.time_mlp)
    time_w, _, _ = modulation(list(denoiser.transformer_blocks), shape)
    table = StepTable(cast(features[:, None], program.like), (1, shape.time_dim))
    every_step = shape.ends + shape.modulation(shape.cond_dim)
    plain = _settings(program) | {
        "weights": {**program.weights, "time_w": cast(time_w, program.like)},
        "tables": {**program.tables, "time_features": table},
        "once": 0,
    }
    computed = {"every_step": every_step + shape.modulation(shape.time_dim), "tabled": False}
    return {
        "modulation computed at every step": PlainDiTProgram(**plain | computed),
        "+ the time's half from a table": PlainDiTProgram(**plain | {"every_step": every_step, "tabled": True}),
        "+ the conditions' half once": program,
    }


# -- RDT: keys and values of language and images projected once


@dataclass(frozen=True, eq=False, kw_only=True)
class PlainRDTProgram(RDTProgram):
    """Cross-attention as written: tokens are projected to keys and values at every use."""

    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        tokens = self.adapted(ops, obs)
        return self.around(ops, obs, list(tokens), list(tokens))

    def attended(self, ops: Ops, layer: int, conditions: Any) -> tuple[Value, Value]:
        tokens = conditions.keys[layer % 2]
        return self.keys(ops, layer, tokens), self.values(ops, layer, tokens)


def _rdt_variants(port: Port, program: RDTProgram) -> dict[str, RDTProgram]:
    changed = {"blocks": program.shape.blocks, "once": program.shape.around}
    return {
        "keys and values projected at every use": PlainRDTProgram(**_settings(program) | changed),
        "+ keys and values projected once": program,
    }


_VARIANTS: dict[type[Program], Callable[[Port, Any], Mapping[str, Program]]] = {
    DPTProgram: _dpt_variants,
    dit.DiTProgram: _dit_variants,
    RDTProgram: _rdt_variants,
}
