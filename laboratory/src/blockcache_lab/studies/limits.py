"""Where the time of an export goes: each kind of node run by itself, beside the whole. Knows nothing of policies.

A kind by itself has the same nodes with the same weights, and is given its other inputs; so all kinds together take about
as long as the whole. What the products take by themselves, no saving of other nodes can go below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import helper, shape_inference

from blockcache.measure import machine
from blockcache.measure.latency import measure
from blockcache_runtime.providers import new_session
from blockcache_runtime.session import run_session

WHOLE, PRODUCTS, ONE_OF_EACH = "everything", "products with weights", "the same with one matrix of each shape"
_KINDS = {
    "norms": ("LayerNormalization",),
    "activations": ("Gelu", "Mish", "Sigmoid"),
    "attention": ("Attention", "Softmax", "MatMul"),
    "sums of residuals, scores and conditions": ("Add", "Sum"),
    "sampler and checks": ("Gemm", "Clip", "Mul", "ReduceL2"),
}
_OTHERS = "shapes"


@dataclass(frozen=True)
class Kind:
    """Nodes of one kind, how many they are, and the milliseconds that they take by themselves; of products also GFLOP/s."""

    kind: str
    nodes: int
    ms: float
    gflops: float | None


def measure_limits(data: bytes, threads: int, repeats: int, progress: bool = True) -> dict[str, Any]:
    """Time an export of a schedule and each kind of its nodes, all in one interleaved run at batch 1, beside the peak.

    Args:
        data: The content of the file.
        threads: Of ONNX Runtime.
        repeats: Interleaved rounds.
    """
    graph = _Graph(data)
    groups = graph.groups()
    models = {WHOLE: data, **{kind: graph.alone(nodes) for kind, nodes in groups.items()}}
    models[ONE_OF_EACH] = graph.alone(groups[PRODUCTS], shared=True)
    peak = machine.peak_gflops(threads)
    latency = measure({name: _call(model, threads) for name, model in models.items()}, repeats, progress=progress)
    counts = {**{kind: len(nodes) for kind, nodes in groups.items()}, ONE_OF_EACH: len(groups[PRODUCTS])}
    flops = sum(map(graph.flops, groups[PRODUCTS]))
    found = [
        Kind(
            name,
            counts.get(name, sum(map(len, groups.values()))),
            latency[name].p50 * 1e3,
            flops / latency[name].p50 / 1e9 if name in (PRODUCTS, ONE_OF_EACH) else None,
        )
        for name in models
    ]
    return {"threads": threads, "peak_gflops": peak, "kinds": [asdict(kind) for kind in found]}


class _Graph:
    """A graph at batch 1, and the shape of every value in it."""

    def __init__(self, data: bytes) -> None:
        model = onnx.load_model_from_string(data)
        for value in model.graph.input:
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param:
                    size.dim_value = 1
        inferred = shape_inference.infer_shapes(model, data_prop=True, strict_mode=True).graph
        self._model = model
        self._constants = {item.name: item for item in model.graph.initializer}
        self._shapes = {name: list(item.dims) for name, item in self._constants.items()}
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            self._shapes[value.name] = [size.dim_value for size in value.type.tensor_type.shape.dim]

    def groups(self) -> dict[str, list[onnx.NodeProto]]:
        found: dict[str, list[onnx.NodeProto]] = {kind: [] for kind in (PRODUCTS, *_KINDS, _OTHERS)}
        for node in self._model.graph.node:
            found[self._kind(node)].append(node)
        return {kind: nodes for kind, nodes in found.items() if nodes}

    def _kind(self, node: onnx.NodeProto) -> str:
        product = node.op_type in ("Gemm", "MatMul") and node.input[1] in self._constants
        if product and not node.attribute:  # a Gemm that has any is a sum of the sampler's
            return PRODUCTS
        return next((kind for kind, operators in _KINDS.items() if node.op_type in operators), _OTHERS)

    def flops(self, product: onnx.NodeProto) -> int:
        return int(2 * prod(self._shapes[product.output[0]]) * self._shapes[product.input[0]][-1])

    def alone(self, nodes: Sequence[onnx.NodeProto], shared: bool = False) -> bytes:
        """These nodes and no others, none of which waits for another. `shared`: matrices of one shape are one."""
        given: dict[str, list[int]] = {}
        first: dict[str, str] = {}

        def named(name: str) -> str:
            shape = self._shapes[name]
            if name not in self._constants:
                name = f"given_{shape}"
                given[name] = shape
            return first.setdefault(str(shape), name) if shared and name in self._constants else name

        kept = [onnx.NodeProto() for _ in nodes]
        for copied, node in zip(kept, nodes, strict=True):
            copied.CopyFrom(node)
            copied.input[:] = [named(name) for name in node.input]
        used = {name for node in kept for name in node.input}
        last = kept[-1].output[0]
        graph = helper.make_graph(
            kept,
            "alone",
            [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in given.items()],
            [helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, self._shapes[last])],
            [item for name, item in self._constants.items() if name in used],
        )
        model = helper.make_model(graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version)
        return bytes(model.SerializeToString())


def _call(model: bytes, threads: int) -> Callable[[], Any]:
    session, rng = new_session(model, threads), np.random.default_rng(0)
    feed = {
        item.name: rng.standard_normal([1 if size == "batch" else size for size in item.shape], dtype=np.float32)
        for item in session.get_inputs()
    }
    return lambda: run_session(session, [], feed)
