"""A CompiledPolicy and a Plan as one ONNX graph: raw observation and noise in, actions in robot units out.

Standard operators only (opset 23), built node by node, every weight stored once, dynamic batch. A schedule's loop is
unrolled: no branch, no cache and no counter is left. Full precision repeats one and the same step and becomes a Scan, a
fiftieth of the nodes at almost the same speed. Knows nothing of ONNX Runtime.

Cross-attention has few keys, so queries and keys meet in one matrix: `norm(x) Wq k` is `norm(x) (Wq k)` and `Wq k`, for
the observations' keys, is computed once per generation; likewise values and the output projection. The time token's share
is a constant of each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from blockcache.engines.compiled import BLOCKS_PER_LAYER, CompiledPolicy
from blockcache.engines.onnx_folding import Array, double, output_folded, query_folded, time_shares
from blockcache.engines.onnx_writer import Writer, value_info
from blockcache.schedule.plan import Compute, Plan

OPSET, IR_VERSION = 23, 11
HIDDEN = -1e30  # a score that no softmax sees; finite, since -inf - -inf is not


def build_graph(
    policy: CompiledPolicy, plan: Plan, metadata: Mapping[str, str], unrolled: bool = False
) -> onnx.ModelProto:
    """The whole generation as one model with inputs `obs`, `noise` and outputs `action` and, for a chunk, `action_pred`.

    `unrolled` has full precision unrolled as well: a little faster, but slow to load and large. For comparison.
    """
    writer = Writer()
    builder = _Builder(policy, writer)
    sample = builder.scan() if plan.computes_everything and not unrolled else builder.unroll(plan)
    outputs = builder.finish(sample)
    draws = 1 + policy.sampler.draw_count
    graph = helper.make_graph(
        writer.nodes,
        "blockcache",
        [
            value_info("obs", ["batch", policy.n_obs_steps, policy.obs_dim]),
            value_info("noise", [draws, "batch", policy.horizon, policy.sample_dim]),
        ],
        outputs,
        list(writer.initializers.values()),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    helper.set_model_props(model, dict(metadata))
    return model


@dataclass(frozen=True)
class _Keys:
    """What cross-attention of one layer multiplies by: scores = norm(x) @ w + b, residual = softmax(scores) @ v."""

    w: str  # (B, d, H * S)
    b: tuple[str, ...]  # to be added up, (B, T, H * S), the mask among them
    v: str  # (B, H * S, d)


class _Builder:
    def __init__(self, policy: CompiledPolicy, writer: Writer) -> None:
        self.policy = policy
        self.writer = writer
        self.layers = len(policy.layers)
        self.slots = policy.cond_tokens  # S: the time token and the observations
        self.columns = policy.heads * self.slots  # one per head and condition token, head by head
        self.ones = writer.constant(np.ones(policy.width), "ones")
        self.time_w, self.time_b, self.time_v = time_shares(policy)
        self.observed = self._observe()
        self.noise = self._noise()  # the start, then each draw, scaled; (B * T, D)
        self.positions = self._positions()

    # -- once per generation

    def _observe(self) -> list[_Keys]:
        """The observations' share of all layers' keys and values, with an empty place for the time token."""
        policy, w, width, observed = self.policy, self.writer, self.policy.width, self.policy.n_obs_steps
        tokens = w.node("Add", w.node("MatMul", "obs", self._weight("obs_w")), self._weight("obs_b"))
        hidden = w.node("Gemm", w.reshape(tokens, -1, width), self._weight("encode_up_w"), self._weight("encode_up_b"))
        tokens = w.node("Gemm", w.node("Mish", hidden), self._weight("encode_down_w"), self._weight("encode_down_b"))
        memory_w = double(policy.memory_w).reshape(width, self.layers, 2, width)
        memory_b = double(policy.memory_b).reshape(self.layers, 2, width)

        def through(place: int, name: str, folded: Array) -> str:
            """Project the tokens to keys (or values) and on through a folded matrix: (L, H, B, S, columns of it)."""
            matrix = w.constant(memory_w[:, :, place].reshape(width, -1), f"{name}_w")
            bias = w.constant(memory_b[:, place].ravel(), f"{name}_b")
            # one row a product (B * n_obs, L * H, 1, d / H): the fastest way through ONNX Runtime for so few rows
            heads = w.reshape(w.node("Gemm", tokens, matrix, bias), -1, self.layers * policy.heads, 1, policy.head_size)
            product = w.node("MatMul", heads, w.constant(folded, f"{name}_folded"))
            product = w.reshape(product, -1, observed, self.layers, policy.heads, folded.shape[-1])
            product = w.node("Transpose", product, perm=[2, 3, 0, 1, 4])
            return w.node("Pad", product, w.constant([0, 0, 0, 1, 0, 0, 0, 0, 0, 0]))

        # the query's bias rides along as one more column
        scores = w.node("Transpose", through(0, "key", query_folded(policy)), perm=[0, 2, 4, 1, 3])
        scores = w.reshape(scores, self.layers, -1, width + 1, self.columns)
        weight = w.node("Slice", scores, w.constant([0]), w.constant([width]), w.constant([2]))
        bias = w.node("Slice", scores, w.constant([width]), w.constant([width + 1]), w.constant([2]))
        bias = w.node("Add", bias, w.constant(self._mask(), "memory_mask"))  # (L, B, T, H * S)
        values = w.node("Transpose", through(1, "value", output_folded(policy)), perm=[0, 2, 1, 3, 4])
        values = w.reshape(values, self.layers, -1, self.columns, width)
        values = w.node("Add", values, w.constant(self._output_bias(), "cross_b"))
        per_layer = [
            w.split(w.reshape(tensor, -1, *shape), self.layers)
            for tensor, shape in (
                (weight, (width, self.columns)),
                (bias, (policy.tokens, self.columns)),
                (values, (self.columns, width)),
            )
        ]
        return [_Keys(w, (b,), v) for w, b, v in zip(*per_layer, strict=True)]

    def _mask(self) -> Array:
        mask = np.zeros((self.policy.tokens, self.slots))
        if self.policy.memory_mask is not None:
            mask = np.maximum(double(self.policy.memory_mask), HIDDEN)
        return np.tile(mask, (1, self.policy.heads))[None, None]

    def _output_bias(self) -> Array:
        """The output projection's bias, on every row of the first head: a head's probabilities sum to one."""
        bias = np.zeros((self.layers, 1, self.columns, self.policy.width))
        for index, layer in enumerate(self.policy.layers):
            bias[index, :, : self.slots] = double(layer.cross_b)
        return bias

    def _noise(self) -> list[str]:
        policy, w, sampler = self.policy, self.writer, self.policy.sampler
        noise = "noise"
        if policy.tokens < policy.horizon:
            noise = w.node("Slice", noise, w.constant([0]), w.constant([policy.tokens]), w.constant([2]))
        scales = [1.0, *(scale for scale, draws in zip(sampler.s, sampler.draws, strict=True) if draws)]
        noise = w.node("Mul", noise, w.constant(np.reshape(scales, (-1, 1, 1, 1)), "noise_scale"))
        return w.split(w.reshape(noise, -1, policy.sample_dim), len(scales))

    def _positions(self) -> str:
        """Position embeddings for each sample of the batch, (B * T, d)."""
        policy, w = self.policy, self.writer
        blank = w.node("MatMul", self.noise[0], w.constant(np.zeros((policy.sample_dim, policy.width)), "blank"))
        blank = w.reshape(blank, -1, policy.tokens, policy.width)
        return w.reshape(w.node("Add", blank, self._weight("input_b")), -1, policy.width)

    # -- the loop

    def unroll(self, plan: Plan) -> str:
        """All steps one after the other; the clean sample (B * T, D)."""
        w, values = self.writer, _Values(self.positions)
        x, x0_prev, drawn = self.noise[0], "", iter(self.noise[1:])
        for step, operations in enumerate(plan.program):
            stream = ""
            waiting: list[str] = []  # to be added before the stream is used again
            for operation in operations:
                if isinstance(operation, Compute):
                    stream = self._stream(x, stream, waiting)
                    index = operation.block // BLOCKS_PER_LAYER
                    keys = self._keys(index, step) if operation.block % BLOCKS_PER_LAYER == 1 else None
                    residual = self._block(w, operation.block, stream, keys)
                    values.residuals[operation.block] = residual
                    waiting = [residual]
                    continue
                if operation.parts:
                    values.sums[operation.run] = w.add([values.at_hand(run) for run in operation.parts])
                added = values.at_hand(operation.run)
                if not stream:
                    stream = self._embed(w, x, values.with_positions(w, added))
                else:
                    waiting.append(added)
            stream = self._stream(x, stream, waiting)
            noise = next(drawn) if self.policy.sampler.draws[step] else None
            x, x0_prev = self._step(step, x, x0_prev, stream, noise)
        return x

    def scan(self) -> str:
        """One step with every block in it, repeated; the sampler's coefficients and the time's shares come in by row."""
        outer, sampler, body = self.writer, self.policy.sampler, Writer(self.writer)
        rows: dict[str, str] = {"noise_row": self._noise_rows()}  # name inside the step -> table outside
        for name, table in (
            ("time_w", self.time_w[..., None]),  # (K, L, d, H, 1)
            ("time_b", self.time_b[:, :, None, :, None]),  # (K, L, 1, H, 1)
            ("time_v", self.time_v[:, :, :, None, :]),  # (K, L, H, 1, d)
        ):
            rows[f"{name}_row"] = outer.constant(table, name)

        def row(value: str, coefficient: str) -> list[str]:
            """value times this step's coefficient; nothing where no step has one."""
            column = getattr(sampler, coefficient)
            if not column.any():
                return []
            rows[f"{coefficient}_row"] = outer.constant(column.reshape(-1, 1), f"sampler_{coefficient}")
            return [body.node("Mul", value, f"{coefficient}_row")]

        keys = self._scan_keys(body)
        stream = self._embed(body, "x", self.positions)
        for block in range(self.layers * BLOCKS_PER_LAYER):
            stream = body.node("Add", stream, self._block(body, block, stream, keys[block // BLOCKS_PER_LAYER]))
        out = self._head(body, stream)
        x0 = self._clip(body, body.add(row("x", "x0_x") + row(out, "x0_out")))
        terms = row("x", "a") + row(x0, "b") + row("x0_prev", "c")
        if sampler.e.any():
            terms += row(body.add(row("x", "eps_x") + row(out, "eps_out")), "e")
        body.nodes.append(helper.make_node("Sum", [*terms, "noise_row"], ["x_next"]))
        body.nodes.append(helper.make_node("Identity", [x0], ["x0_next"]))
        graph = helper.make_graph(
            body.nodes,
            "step",
            [value_info(name, None) for name in ("x", "x0_prev", *rows)],
            [value_info(name, None) for name in ("x_next", "x0_next")],
        )
        start = self.noise[0]
        blank = outer.node("Mul", start, outer.constant(0.0))
        return outer.nodes_out("Scan", 2, start, blank, *rows.values(), body=graph, num_scan_inputs=len(rows))[0]

    def _noise_rows(self) -> str:
        """(K, B * T, D), zero where a step draws nothing."""
        w, drawn = self.writer, iter(self.noise[1:])
        blank = w.node("Mul", self.noise[0], w.constant(0.0))
        rows = [next(drawn) if draws else blank for draws in self.policy.sampler.draws]
        stacked = w.node("Concat", *rows, axis=0)
        return w.reshape(stacked, self.policy.sampler.steps, -1, self.policy.sample_dim)

    def _scan_keys(self, body: Writer) -> list[_Keys]:
        observed = self.slots - 1
        shares: list[list[str]] = []
        for name, pads, shape in (
            ("time_w_row", [0] * 7 + [observed], (self.layers, self.policy.width, self.columns)),
            ("time_b_row", [0] * 7 + [observed], (self.layers, 1, self.columns)),
            ("time_v_row", [0] * 6 + [observed, 0], (self.layers, self.columns, self.policy.width)),
        ):
            padded = body.reshape(body.node("Pad", name, body.constant(pads)), *shape)
            shares.append(body.split(padded, self.layers))
        return [
            _Keys(body.node("Add", own.w, w), (*own.b, b), body.node("Add", own.v, v))
            for own, w, b, v in zip(self.observed, *shares, strict=True)
        ]

    def _keys(self, layer: int, step: int) -> _Keys:
        """One layer's keys and values at one step: the observations' and the time token's."""
        w, own, heads, width = self.writer, self.observed[layer], self.policy.heads, self.policy.width
        weight, bias = np.zeros((width, heads, self.slots)), np.zeros((heads, self.slots))
        value = np.zeros((heads, self.slots, width))
        weight[:, :, 0], bias[:, 0] = self.time_w[step, layer], self.time_b[step, layer]
        value[:, 0] = self.time_v[step, layer]
        return _Keys(
            w.node("Add", own.w, w.constant(weight.reshape(1, width, -1))),
            (*own.b, w.constant(bias.reshape(1, 1, -1))),
            w.node("Add", own.v, w.constant(value.reshape(1, -1, width))),
        )

    def _stream(self, x: str, stream: str, waiting: list[str]) -> str:
        if not stream:
            stream = self._embed(self.writer, x, self.positions)
        return self.writer.add([stream, *waiting])

    def _embed(self, w: Writer, x: str, added: str) -> str:
        return w.node("Gemm", x, self._weight("input_w"), added)

    def _block(self, w: Writer, block: int, stream: str, keys: _Keys | None) -> str:
        """The residual of a block, (B * T, d)."""
        index, place = divmod(block, BLOCKS_PER_LAYER)
        normed = w.node("LayerNormalization", stream, self.ones, axis=-1, epsilon=self.policy.norm_eps)
        if place == 0:
            return self._self_attention(w, index, normed)
        if place == 1:
            assert keys is not None
            return self._cross_attention(w, normed, keys)
        hidden = w.node("Gelu", self._gemm(w, normed, index, "up"))
        return self._gemm(w, hidden, index, "down")

    def _self_attention(self, w: Writer, index: int, normed: str) -> str:
        policy = self.policy
        qkv = w.reshape(self._gemm(w, normed, index, "qkv"), -1, policy.tokens, 3 * policy.width)
        inputs = w.split(qkv, 3, axis=-1)
        if policy.self_mask is not None and not policy.causal:
            inputs.append(w.constant(np.maximum(double(policy.self_mask), HIDDEN), "self_mask"))
        attended = w.node(
            "Attention",
            *inputs,
            q_num_heads=policy.heads,
            kv_num_heads=policy.heads,
            is_causal=int(policy.causal),
            scale=1.0,  # in the query already
        )
        return self._gemm(w, w.reshape(attended, -1, policy.width), index, "out")

    def _cross_attention(self, w: Writer, normed: str, keys: _Keys) -> str:
        policy = self.policy
        scores = w.node("MatMul", w.reshape(normed, -1, policy.tokens, policy.width), keys.w)
        scores = w.reshape(w.add([scores, *keys.b]), -1, self.slots)
        shares = w.reshape(w.node("Softmax", scores, axis=-1), -1, policy.tokens, self.columns)
        return w.reshape(w.node("MatMul", shares, keys.v), -1, policy.width)

    def _head(self, w: Writer, stream: str) -> str:
        normed = w.node("LayerNormalization", stream, self.ones, axis=-1, epsilon=self.policy.norm_eps)
        return w.node("Gemm", normed, self._weight("head_w"), self._weight("head_b"))

    def _clip(self, w: Writer, x0: str) -> str:
        clip = self.policy.sampler.clip
        if clip is None:
            return x0
        return w.node("Clip", x0, w.constant(-clip, "clip_low"), w.constant(clip, "clip_high"))

    def _step(self, step: int, x: str, x0_prev: str, stream: str, noise: str | None) -> tuple[str, str]:
        """The sampler's step with its constants: the next sample and the clipped x0."""
        w, table = self.writer, self.policy.sampler
        out = self._head(w, stream)
        x0 = self._mix(x, float(table.x0_x[step]), out, float(table.x0_out[step]))
        x0 = self._clip(w, x0)
        terms = [(x, float(table.a[step])), (x0, float(table.b[step]))]
        if table.e[step]:
            eps = self._mix(x, float(table.eps_x[step]), out, float(table.eps_out[step]))
            terms.append((eps, float(table.e[step])))
        if table.c[step]:
            terms.append((x0_prev, float(table.c[step])))
        added = [w.scaled(value, factor) for value, factor in terms if factor]
        return w.add([*added, *([noise] if noise else [])]), x0

    def _mix(self, x: str, x_factor: float, out: str, out_factor: float) -> str:
        terms = [self.writer.scaled(value, factor) for value, factor in ((x, x_factor), (out, out_factor)) if factor]
        return self.writer.add(terms)

    def finish(self, sample: str) -> list[onnx.ValueInfoProto]:
        """Robot units, and the executed slice."""
        policy, w = self.policy, self.writer
        actions = w.reshape(sample, -1, policy.tokens, policy.sample_dim)
        actions = w.node("Mul", actions, self._weight("action_scale"))
        chunk = "action_pred" if policy.whole else "actions"
        w.nodes.append(helper.make_node("Add", [actions, self._weight("action_offset")], [chunk]))
        start, stop = policy.executed
        ends = w.constant([start]), w.constant([stop]), w.constant([1])
        w.nodes.append(helper.make_node("Slice", [chunk, *ends], ["action"]))
        values = [value_info("action", ["batch", stop - start, policy.sample_dim])]
        if policy.whole:
            values.append(value_info("action_pred", ["batch", policy.tokens, policy.sample_dim]))
        return values

    def _gemm(self, w: Writer, value: str, index: int, name: str) -> str:
        layer = self.policy.layers[index]
        weight, bias = (getattr(layer, f"{name}_{part}") for part in "wb")
        return w.node(
            "Gemm",
            value,
            w.constant(double(weight), f"{name}_w{index}"),
            w.constant(double(bias), f"{name}_b{index}"),
        )

    def _weight(self, name: str) -> str:
        if name not in self.writer.initializers:
            self.writer.constant(double(getattr(self.policy, name)), name)
        return name


class _Values:
    """Names of what is at hand while the loop is unrolled."""

    def __init__(self, positions: str) -> None:
        self.residuals: dict[int, str] = {}
        self.sums: dict[tuple[int, int], str] = {}
        self._positions = positions
        self._placed: dict[str, str] = {}

    def at_hand(self, run: tuple[int, int]) -> str:
        return self.residuals[run[0]] if run[0] == run[1] else self.sums[run]

    def with_positions(self, w: Writer, value: str) -> str:
        """A run at the start of the stream rides on the input embedding's bias."""
        if value not in self._placed:
            self._placed[value] = w.node("Add", value, self._positions)
        return self._placed[value]
