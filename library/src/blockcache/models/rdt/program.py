"""RDT as a program: what is done per generation, per step, in a block; and how a policy is folded into it.

Language and image tokens do not change in a generation, so their keys (normed) and values are projected once for every
layer: about nine tenths of what the public code computes at every step. No matrix is copied, since at 1.2 thousand million
numbers that would be five gigabytes: the program multiplies by the policy's own, as views. What is folded is small: the
attention scale into the gain of the queries' norms, the time's embedding into a table over all steps. Knows nothing of
backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.models.folding import Pair, named, signature, step_times
from blockcache.models.port import Port
from blockcache.models.program import Ops, Program, StepTable, UnsupportedError, Value
from blockcache.models.rdt.denoiser import FRONT, RDTShape, frequencies

SA, CA, FFN = range(3)
LANGUAGE, IMAGE = range(2)
_HIDDEN = 1e17
"""What is taken from the scores of tokens that are not there; within the limit of a program's weights."""


@dataclass(frozen=True)
class Conditions:
    """One generation's."""

    start: Value  # (B * (3 + T), d) positions, frequency and state; the time is missing
    masked: Value  # (B, 1, d) the action mask's share of the sample's adaptor, with its bias
    action_mask: Value  # (B, 1, A)
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
        rate = self.linear(ops, "freq_down", ops.activation(self.linear(ops, "freq_up", waves), "silu"))
        rate, sensed, masked = (ops.reshape(item, (-1, 1, width)) for item in (rate, sensed, masked))
        blank, places = ops.mul(rate, ops.weight("zero")), ops.weight("places")
        front = ops.add([ops.concat([blank, rate, sensed], axis=1), ops.slice(places, 1, 0, FRONT)])
        rows = [front, ops.add([blank, ops.slice(places, 1, FRONT, FRONT + horizon)])]
        seen = ops.reshape(obs["lang_attn_mask"], (-1, 1, 1, self.shape.conditions[LANGUAGE]))
        hidden = ops.add([ops.mul(seen, ops.weight("hide")), ops.weight("hide_all")])
        action_mask = ops.reshape(mask, (-1, 1, self.action_dim))
        return Conditions(ops.reshape(ops.concat(rows, axis=1), (-1, width)), masked, action_mask, hidden, keys, values)

    def adapted(self, ops: Ops, obs: Mapping[str, Value]) -> tuple[Value, Value]:
        """Language and image tokens as they are attended to, (B * S, d) each."""
        found = []
        for place, name in enumerate(("lang", "img")):
            tokens = obs[f"{name}_tokens"]
            tokens = ops.reshape(tokens, (-1, self.inputs[f"{name}_tokens"][-1]))
            tokens = self._deeper(ops, name, place, self.linear(ops, name, tokens, 0))
            tokens = ops.reshape(tokens, (-1, self.shape.conditions[place], self.width))
            found.append(ops.reshape(ops.add([tokens, ops.weight(f"{name}_places")]), (-1, self.width)))
        return found[LANGUAGE], found[IMAGE]

    def keys(self, ops: Ops, layer: int, tokens: Value) -> Value:
        keys = self._by_head(ops, self.linear(ops, "key", tokens, layer), f"key_gain{layer}")
        keys = ops.reshape(keys, (-1, self.shape.conditions[layer % 2], self.heads, self.size))
        return ops.transpose(keys, (0, 2, 3, 1))

    def values(self, ops: Ops, layer: int, tokens: Value) -> Value:
        values = self.linear(ops, "value", tokens, layer)
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
        return self.linear(ops, "down", ops.activation(self.linear(ops, "up", normed, layer), "gelu_tanh"), layer)

    def attended(self, ops: Ops, layer: int, conditions: Any) -> tuple[Value, Value]:
        """A layer's keys and values of language or image tokens."""
        return conditions.keys[layer], conditions.values[layer]

    def _self_attention(self, ops: Ops, layer: int, normed: Value) -> Value:
        q, k, v = ops.split(self.linear(ops, "qkv", normed, layer), 3, -1)
        q, k = (self._by_head(ops, item, f"own_{name}_gain{layer}") for item, name in ((q, "query"), (k, "key")))
        q, k, v = (ops.reshape(item, (-1, self.shape.tokens, self.width)) for item in (q, k, v))
        attended = ops.attention(q, k, v, self.heads)
        return self.linear(ops, "out", ops.reshape(attended, (-1, self.width)), layer)

    def _cross_attention(
        self, ops: Ops, layer: int, normed: Value, keys: Value, values: Value, hidden: Value | None
    ) -> Value:
        query = self._by_head(ops, self.linear(ops, "query", normed, layer), f"query_gain{layer}")
        attended = ops.attend(self._heads_first(ops, query, self.shape.tokens), keys, values, hidden)
        attended = ops.reshape(ops.transpose(attended, (0, 2, 1, 3)), (-1, self.width))
        return self.linear(ops, "cross", attended, layer)

    def leave(self, ops: Ops, stream: Value, conditions: Any, step: Any) -> Value:
        places = ops.reshape(stream, (-1, self.shape.tokens, self.width))
        actions = ops.reshape(ops.slice(places, 1, FRONT, self.shape.tokens), (-1, self.width))
        normed = self._normed(ops, actions, self.width, "final_gain")
        return self.linear(ops, "final_down", ops.activation(self.linear(ops, "final_up", normed), "gelu_tanh"))

    def finish(self, ops: Ops, sample: Value) -> Value:
        return ops.reshape(sample, (-1, self.shape.horizon, self.action_dim))

    def select(self, ops: Ops, actions: Value, conditions: Any) -> Value:
        return ops.mul(actions, conditions.action_mask)

    def _deeper(self, ops: Ops, name: str, place: int, x: Value) -> Value:
        """An adaptor behind its first matrix."""
        for index in range(1, self.adaptors[place]):
            x = self.linear(ops, name, ops.activation(x, "gelu_tanh"), index)
        return x

    def _by_head(self, ops: Ops, x: Value, gain: str) -> Value:
        """Normed head by head: (rows, d) -> (rows, H, d / H)."""
        return self._normed(ops, ops.reshape(x, (-1, self.heads, self.size)), self.size, gain)

    def _normed(self, ops: Ops, x: Value, width: int, gain: str) -> Value:
        return ops.mul(ops.scale_norm(x, width, self.norm_eps, self.norm == "std"), ops.weight(gain))

    def _heads_first(self, ops: Ops, x: Value, tokens: int) -> Value:
        """-> (B, H, tokens, d / H)."""
        return ops.transpose(ops.reshape(x, (-1, tokens, self.heads, self.size)), (0, 2, 1, 3))


# -- folding


@torch.no_grad()
def fold(port: Port, shape: RDTShape, norm: tuple[str, float]) -> RDTProgram:
    """Fold the policy behind a port, or say what about it cannot be; `norm` is how its norms divide, and their eps."""
    denoiser: Any = port.adapter.denoiser
    model: Any = denoiser.model
    like: Tensor = model.x_pos_embed.detach()
    if like.dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(f"weights in {like.dtype} (only float32 and float64)")
    heads, policy = port.adapter.widths["heads"], port.policy
    scale = (shape.width // heads) ** -0.5
    hidden = min(_HIDDEN, torch.finfo(like.dtype).max / 4)
    weights: dict[str, Tensor] = {
        "places": like,
        "lang_places": model.lang_cond_pos_embed.detach()[:, : policy.config.lang_len],
        "img_places": model.img_cond_pos_embed.detach(),
        "frequencies": frequencies(like.device).to(like)[None],
        "zero": like.new_zeros(1),
        "hide": like.new_tensor([hidden]),
        "hide_all": like.new_tensor([-hidden]),
    }
    adaptors = [_linears(getattr(denoiser, f"{name}_adaptor")) for name in ("lang", "img", "state")]
    for name, linears in zip(("lang", "img", "state"), adaptors, strict=True):
        for index, linear in enumerate(linears):
            weights |= named({name: _views(linear)}, index)
    whole = weights["state_w0"]  # (2 A, d): of the sample, then of the mask
    weights |= {"state_w0": whole[: shape.action_dim], "mask_w": whole[shape.action_dim :]}
    up, down = _mlp(model.freq_embedder)
    final = model.final_layer
    ends = {"freq_up": up, "freq_down": down, "final_up": final.ffn_final.fc1, "final_down": final.ffn_final.fc2}
    weights |= named({name: _views(linear) for name, linear in ends.items()})
    weights["final_gain"] = final.norm_final.weight.detach()
    for index, block in enumerate(model.blocks):
        weights |= _layer(index, block, shape.width, scale)
    time: Tensor = model.t_embedder(step_times(port, like.device)).to(like)  # (K, d)
    return RDTProgram(
        inputs=port.inputs,
        chunk=(shape.horizon, shape.action_dim),
        tokens=shape.horizon,
        executed=port.executed,
        action_dim=shape.action_dim,
        blocks=shape.folded_blocks,
        once=shape.folded_once,
        every_step=shape.folded_every_step,
        weights=weights,
        tables={"time": StepTable(time[:, None, None], (1, FRONT, shape.width), (FRONT - 1, 0))},
        signature=signature(norm, time),
        shape=shape,
        heads=heads,
        norm=norm[0],
        norm_eps=norm[1],
        adaptors=(len(adaptors[0]), len(adaptors[1]), len(adaptors[2])),
    )


def _layer(index: int, block: Any, width: int, scale: float) -> dict[str, Tensor]:
    own, cross = block.attn, block.cross_attn
    both_w, both_b = _views(cross.kv)
    pairs = {
        "qkv": _views(own.qkv),
        "out": _views(own.proj),
        "query": _views(cross.q),
        "key": (both_w[:, :width], both_b[:width]),
        "value": (both_w[:, width:], both_b[width:]),
        "cross": _views(cross.proj),
        "up": _views(block.ffn.fc1),
        "down": _views(block.ffn.fc2),
    }
    gains = {
        **{f"norm{place}": getattr(block, f"norm{place}").weight.detach() for place in (1, 2, 3)},
        "own_query": own.q_norm.weight.detach() * scale,
        "own_key": own.k_norm.weight.detach(),
        "query": cross.q_norm.weight.detach() * scale,
        "key": cross.k_norm.weight.detach(),
    }
    return named(pairs, index) | {f"{name}_gain{index}": gain for name, gain in gains.items()}


def _views(module: Any) -> Pair:
    """Matrix (inputs, outputs) and bias of a Linear, `x @ w + b`: its own numbers, not a copy."""
    if type(module) is not nn.Linear or module.bias is None:
        raise UnsupportedError(f"a {type(module).__name__} where a Linear with a bias is expected")
    return module.weight.detach().T, module.bias.detach()


def _linears(adaptor: Any) -> list[Any]:
    """The matrices of an adaptor."""
    parts = list(adaptor) if isinstance(adaptor, nn.Sequential) else [adaptor]
    between = [part for part in parts[1::2] if not (type(part) is nn.GELU and part.approximate == "tanh")]
    if between or len(parts) % 2 == 0:
        raise UnsupportedError("an adaptor of other parts than matrices and GELU (tanh) in turn")
    return parts[::2]


def _mlp(embedder: Any) -> tuple[Any, Any]:
    parts = list(getattr(embedder, "mlp", ()))
    if len(parts) != 3 or type(parts[1]) is not nn.SiLU:
        raise UnsupportedError("an embedding other than Linear, SiLU, Linear")
    return parts[0], parts[2]
