"""The ONNX backend: writes nodes instead of executing. Standard operators only (opset 23), every weight stored once.

Values are names in the graph. Knows nothing of programs, plans or ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from blockcache.engines.walk import Step
from blockcache.models.program import Activation, Program, StepTable
from blockcache.samplers import Coefficients, SamplerTable

UNROLLED_STEPS = 5  # full precision of so many steps is unrolled too: a tenth faster than as a Scan, and small still
HIDDEN = -1e30  # a score that no softmax sees; finite, since -inf - -inf is not
_ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "cos": ("Cos", {}),
    "gelu": ("Gelu", {}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "mish": ("Mish", {}),
    "relu": ("Relu", {}),
    "sin": ("Sin", {}),
}


class GraphWriter:
    """A graph under construction: nodes and initializers. Values are names, which are given out in order."""

    def __init__(self, prefix: str, initializers: dict[str, onnx.TensorProto]) -> None:
        """Begin without nodes.

        Args:
            prefix: How names of values begin.
            initializers: Constants by name, to which others are added.
        """
        self.nodes: list[onnx.NodeProto] = []
        self.initializers = initializers
        self._prefix, self._count = prefix, 0

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.several(kind, 1, *inputs, **attributes)[0]

    def several(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        """A node with several outputs."""
        names = [f"{self._prefix}{self._count + index}" for index in range(outputs)]
        self._count += outputs
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def name(self, value: str, name: str) -> None:
        """Give a value another name, such as that of an output."""
        self.nodes.append(helper.make_node("Identity", [value], [name]))

    def constant(self, value: Any, name: str | None = None) -> str:
        """An initializer: float32, or int64 for whole numbers. A given name stands for one value for ever."""
        array = np.asarray(value)
        whole = array.dtype.kind in "iu"
        array = array.astype(np.int64 if whole else np.float32)
        if name is None:
            name = f"i{'_'.join(map(str, array.ravel()))}" if whole else f"c{len(self.initializers)}"
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name


class OnnxBackend(GraphWriter):
    """One generation as a graph. See `models.program.Ops` for what each operation does.

    Rows of tables are constants of their step.

    Args:
        program: Whose weights and tables are written.
        unrolled: Whether full precision is unrolled too, instead of a Scan; None for few steps only.
        outer: The graph around this one, whose initializers it shares; for the body of a Scan.
    """

    def __init__(self, program: Program, unrolled: bool | None = None, outer: OnnxBackend | None = None) -> None:
        super().__init__("s" if outer else "t", outer.initializers if outer else {})
        self._program, self._unrolled = program, unrolled
        self._rows_like = ""  # the start of the sample: a value with one row for each token of the batch
        self._outputs: list[str] = []  # of the denoiser, to be measured in the end
        self._norms: list[str] = []  # (n, 1) each

    def weight(self, name: str) -> str:
        return name if name in self.initializers else self.constant(_finite(self._program.weights[name]), name)

    def row(self, table: str, step: Any, part: int = 0) -> str:
        name = f"{table}_{step}_{part}"
        return name if name in self.initializers else self.constant(_row(self._program.tables[table], step, part), name)

    def per_sample(self, value: str) -> str:
        (tokens, width), inputs = self._program.weights[value].shape, self._program.chunk[1]
        blank = self.node("MatMul", self._rows_like, self.constant(np.zeros((inputs, width)), f"blank_{width}"))
        blank = self.reshape(blank, (-1, tokens, width))
        return self.reshape(self.node("Add", blank, value), (-1, width))

    def linear(self, x: str, w: str, b: str) -> str:
        return self.node("Gemm", x, w, b)

    def grouped(self, x: str, w: str) -> str:
        """One row a product: the fastest way through ONNX Runtime for few rows."""
        groups, inputs, outputs = self._program.weights[w].shape
        product = self.node("MatMul", self.reshape(x, (-1, groups, 1, inputs)), w)
        return self.reshape(product, (-1, groups, outputs))

    def matmul(self, a: str, b: str) -> str:
        return self.node("MatMul", a, b)

    def add(self, values: Sequence[str]) -> str:
        if len(values) == 1:
            return values[0]
        return self.node("Add" if len(values) == 2 else "Sum", *values)

    def mul(self, a: str, b: str) -> str:
        return self.node("Mul", a, b)

    def layer_norm(self, x: str, width: int, eps: float) -> str:
        ones = self.constant(np.ones(width), f"ones_{width}")
        return self.node("LayerNormalization", x, ones, axis=-1, epsilon=eps)

    def scale_norm(self, x: str, width: int, eps: float, centred: bool) -> str:
        last = self.constant([-1])
        apart = self.node("Sub", x, self.node("ReduceMean", x, last)) if centred else x
        power = self.node("ReduceMean", self.node("Mul", apart, apart), last)
        unbiased = (
            self.node("Mul", power, self.constant(width / (width - 1), f"unbiased_{width}")) if centred else power
        )
        return self.node("Div", x, self.node("Sqrt", self.node("Add", unbiased, self.constant(eps, f"eps_{eps:g}"))))

    def activation(self, x: str, kind: Activation) -> str:
        if kind == "silu":
            return self.node("Mul", x, self.node("Sigmoid", x))
        operator, attributes = _ACTIVATIONS[kind]
        return self.node(operator, x, **attributes)

    def softmax(self, x: str) -> str:
        return self.node("Softmax", x, axis=-1)

    def attention(self, q: str, k: str, v: str, heads: int, mask: str | None = None, causal: bool = False) -> str:
        masks = [self.weight(mask)] if mask is not None and not causal else []
        settings = {"q_num_heads": heads, "kv_num_heads": heads, "is_causal": int(causal), "scale": 1.0}
        return self.node("Attention", q, k, v, *masks, **settings)

    def attend(self, q: str, k: str, v: str, hidden: str | None = None) -> str:
        scores = self.node("MatMul", q, k)
        scores = scores if hidden is None else self.node("Add", scores, hidden)
        return self.node("MatMul", self.softmax(scores), v)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        return self.node("Reshape", x, self.constant(list(shape)))

    def transpose(self, x: str, order: Sequence[int]) -> str:
        return self.node("Transpose", x, perm=list(order))

    def split(self, x: str, parts: int, axis: int = 0) -> list[str]:
        return [x] if parts == 1 else self.several("Split", parts, x, axis=axis, num_outputs=parts)

    def slice(self, x: str, axis: int, start: int, stop: int) -> str:
        return self.node("Slice", x, *(self.constant([item]) for item in (start, stop, axis)))

    def pad(self, x: str, axis: int, before: int) -> str:
        pads = [0] * 10
        pads[axis] = before
        return self.node("Pad", x, self.constant(pads))

    def concat(self, values: Sequence[str], axis: int) -> str:
        return values[0] if len(values) == 1 else self.node("Concat", *values, axis=axis)

    def conv(self, x: str, w: str, stride: int, padding: int) -> str:
        size = self._program.weights[w].shape[-1]
        return self.node("Conv", x, w, **_window(size, stride, padding))

    def group_norm(self, x: str, gain: str, bias: str, groups: int, eps: float, sides: tuple[int, int]) -> str:
        """A group as one channel of an instance norm: ONNX Runtime puts a group norm together out of slower parts."""
        channels = len(self._program.weights[gain])
        ones = self.constant(np.ones(groups), f"ones_{groups}")
        zeros = self.constant(np.zeros(groups), f"zeros_{groups}")
        size = channels // groups * sides[0] * sides[1]
        normed = self.node("InstanceNormalization", self.reshape(x, (-1, groups, size)), ones, zeros, epsilon=eps)
        for kind, name in (("Mul", gain), ("Add", bias)):
            row = self.constant(_finite(self._program.weights[name]).reshape(-1, 1, 1), name)
            normed = self.node(kind, self.reshape(normed, (-1, channels, *sides)) if kind == "Mul" else normed, row)
        return normed

    def max_pool(self, x: str, size: int, stride: int, padding: int) -> str:
        return self.node("MaxPool", x, **_window(size, stride, padding))

    def mix(self, *terms: tuple[str, Any]) -> str:
        """A Gemm with the identity is a x + b y in one node, where Mul and Add take three."""
        (total, scale), *others = terms
        for value, factor in others:
            same = self.constant(np.eye(self._program.chunk[1]), "identity")
            total, scale = self.node("Gemm", value, same, total, alpha=factor, beta=scale), 1.0
        return total if scale == 1.0 else self.node("Mul", total, self.constant(float(scale)))

    def clip(self, value: str, limit: float) -> str:
        low, high = self.constant(-limit, "clip_low"), self.constant(limit, "clip_high")
        return self.node("Clip", value, low, high)

    def scaled_noise(self, noise: str, scales: Sequence[float], tokens: int) -> list[str]:
        horizon, size = self._program.chunk
        if tokens < horizon:
            noise = self.slice(noise, 2, 0, tokens)
        noise = self.node("Mul", noise, self.constant(np.reshape(scales, (-1, 1, 1, 1)), "noise_scale"))
        tensors = self.split(self.reshape(noise, (-1, size)), len(scales))
        self._rows_like = tensors[0]
        return tensors

    def pull(self, delay: str, overlap: str, before: int, tokens: int) -> tuple[str, str]:
        place, one = np.arange(tokens) - before, self.constant(1.0, "one")
        delay, overlap = (self.reshape(value, (-1, 1)) for value in (delay, overlap))
        falling = self.node("Sub", overlap, self.constant(place.astype(np.float64), "told_places"))
        steps = self.node("Add", self.node("Sub", overlap, delay), one)
        weights = self.node("Clip", self.node("Div", falling, steps), self.constant(0.0, "zero"), one)
        weights = self.node("Mul", weights, self.constant((place >= 0) * 1.0, "told_tokens"))
        pull = self.reshape(weights, (-1, 1))
        return pull, self.node("Sub", one, pull)

    def repeat(self, body: Step, sampler: SamplerTable, noise: Sequence[str]) -> str | None:
        """A Scan: a fiftieth of the nodes at almost the same speed. What a step reads by its number comes in by row."""
        if self._unrolled or (self._unrolled is None and sampler.steps <= UNROLLED_STEPS):
            return None
        rows: dict[str, str] = {}  # name inside the step -> table outside
        size = self._program.chunk[1]
        start, drawn = noise[0], iter(noise[1:])
        blank = self.node("Mul", start, self.constant(0.0))
        stacked = self.node("Concat", *(next(drawn) if draws else blank for draws in sampler.draws), axis=0)
        rows["noise_row"] = self.reshape(stacked, (sampler.steps, -1, size))

        def row(name: str, column: npt.NDArray[np.float64]) -> str:
            rows[f"{name}_row"] = self.constant(column.reshape(-1, 1), f"sampler_{name}")
            return f"{name}_row"

        def coefficient(name: str) -> Any:
            column = np.asarray(getattr(sampler, name))
            if not column.any():
                return 0.0  # no step has one
            return row(name, column)

        def guided() -> tuple[str, str]:
            of_sample, of_clean = sampler.eps_of_clean()
            return row("eps_sample", of_sample), row("eps_clean", of_clean)

        named = {item.name: coefficient(item.name) for item in fields(Coefficients) if item.name not in ("clip", "s")}
        at = _RowCoefficients(**named, s=1.0, clip=sampler.clip, guided=guided)
        step = _ScanBackend(self._program, self, rows)
        x, x0 = body(step, None, at, "x", "x0_prev", "noise_row")
        for name, value in (("x_next", x), ("x0_next", x0), ("step_norm", step.norms())):
            step.name(value, name)
        graph = helper.make_graph(
            step.nodes,
            "step",
            [value_info(name, None) for name in ("x", "x0_prev", *rows)],
            [value_info(name, None) for name in ("x_next", "x0_next", "step_norm")],
        )
        clean, _, norms = self.several("Scan", 3, start, blank, *rows.values(), body=graph, num_scan_inputs=len(rows))
        self._norms.append(norms)  # (K, 1)
        return clean

    def watch(self, stream: str, output: str) -> None:
        self._norms.append(self._norm(stream))  # at once, since streams of all steps would take much memory
        self._outputs.append(output)

    def norms(self, actions: str | None = None) -> str:
        """(1,)"""
        small = [self.concat(self._outputs, 0)] if self._outputs else []
        if actions is not None:
            small.append(self.reshape(actions, (-1, self._program.action_dim)))
        found = self.concat([*self._norms, *map(self._norm, small)], 0)
        return self.reshape(self._norm(found), (-1,))

    def _norm(self, rows: str) -> str:
        """Of all rows as one, (1, 1), which is faster than row by row. NaN shows in it; ReduceMax passes over NaN."""
        return self.node("ReduceL2", rows)


@dataclass(frozen=True, kw_only=True)
class _RowCoefficients(Coefficients):
    """Names of rows inside a Scan; those that a guide alone needs come in when it asks for them."""

    guided: Callable[[], tuple[str, str]]

    def eps_of_clean(self) -> tuple[str, str]:
        return self.guided()


class _ScanBackend(OnnxBackend):
    """Inside a Scan: rows of tables are inputs of the step, with most of their zeros filled in there."""

    def __init__(self, program: Program, outer: OnnxBackend, rows: dict[str, str]) -> None:
        super().__init__(program, outer=outer)
        self._outer, self._rows = outer, rows
        self._parts: dict[str, list[str]] = {}

    def mix(self, *terms: tuple[str, Any]) -> str:
        """Factors are rows of the sampler's table too, but for that of the noise, which is scaled already."""
        return self.add([v if f == 1.0 else self.node("Mul", v, f) for v, f in terms])

    def row(self, table: str, step: Any, part: int = 0) -> str:
        if table not in self._parts:
            self._parts[table] = self._enter(table, self._program.tables[table])
        return self._parts[table][part]

    def _enter(self, name: str, table: StepTable) -> list[str]:
        """Zeros behind the last axis are in the file: for those alone Pad would take longer than a block."""
        parts = table.values.shape[1]
        *outer, last = table.pads or (0,)
        values = np.pad(_finite(table.values), [(0, 0)] * (table.values.ndim - 1) + [(0, last)])
        value = f"{name}_row"
        self._rows[value] = self._outer.constant(values, name)
        if any(outer):
            value = self.node("Pad", value, self.constant([0] * (1 + len(table.pads)) + [0, *outer, 0]))
        return self.split(self.reshape(value, (parts, *table.shape[1:])), parts)


def value_info(name: str, shape: Sequence[Any] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _window(size: int, stride: int, padding: int) -> dict[str, list[int]]:
    return {"kernel_shape": [size] * 2, "strides": [stride] * 2, "pads": [padding] * 4}


def _row(table: StepTable, step: int, part: int) -> npt.NDArray[np.float64]:
    row = _finite(table.values[step, part])
    padded = np.pad(row, [(0, after) for after in table.pads]) if any(table.pads) else row
    return padded.reshape(table.shape)


def _finite(tensor: Any) -> npt.NDArray[np.float64]:
    return np.maximum(np.asarray(tensor.detach().cpu(), dtype=np.float64), HIDDEN)
