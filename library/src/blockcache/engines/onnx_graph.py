"""One generation as one ONNX model: the walk on the ONNX backend. Raw observation and noise in, actions in robot units out.

A schedule's loop is unrolled: no branch, no cache and no counter is left. Full precision of many steps repeats one and the
same step and becomes a Scan. The batch is dynamic. Knows nothing of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import helper

from blockcache.engines.onnx_backend import OnnxBackend, value_info
from blockcache.engines.walk import TOLD_SCALE, generate
from blockcache.models.program import Program
from blockcache.samplers import SamplerTable
from blockcache.schedule.plan import Plan
from blockcache_runtime.chunks import EXECUTION_HORIZON, LATENCY, PREVIOUS_CHUNK
from blockcache_runtime.session import EARLIER_FEATURES, IN_FULL

OPSET, IR_VERSION = 23, 11


def build_graph(program: Program, plan: Plan, sampler: SamplerTable, unrolled: bool | None = None) -> onnx.ModelProto:
    """A model with the program's inputs and `noise`, and the outputs `action`, for a whole chunk `action_pred`, and `norms`,
    which tells whether something on the way was not finite (see `walk.generate`).

    With cameras it takes frames by moment, and as `kept_features` what the moments before them showed, which need not be
    looked at again: none of them, or all but one. It gives the `features` of all moments back. A program that can be told of
    the chunk before takes the three inputs that `chunks` names as well.

    Args:
        program: The denoiser.
        plan: Which blocks are computed at which step.
        sampler: The coefficients of all steps.
        unrolled: Whether full precision is unrolled as well: faster, but with many steps slow to load and large. Without it
            that is decided by their number.
    """
    backend = OnnxBackend(program, unrolled)
    inputs = _inputs(program)
    found = generate(backend, program, plan, sampler, {name: name for name in inputs}, "noise")
    start, stop = program.executed
    sizes = {"action": stop - start, "action_pred": program.tokens}
    shapes = {name: ["batch", size, program.action_dim] for name, size in sizes.items()} | {"norms": [1]}
    if program.cameras:
        shapes["features"] = [program.inputs[program.cameras[0]][0], "batch", program.features]
    for name, value in found.items():
        backend.name(value, name)
    graph = helper.make_graph(
        backend.nodes,
        "blockcache",
        [
            *(value_info(name, shape) for name, shape in inputs.items()),
            value_info("noise", [1 + sampler.draw_count, "batch", *program.chunk]),
        ],
        [value_info(name, shapes[name]) for name in found],
        list(backend.initializers.values()),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def joined(fast: onnx.ModelProto, full: onnx.ModelProto) -> None:
    """Put a second model beside a first one, with every weight that both have once: what it gives, and the noise that it
    takes, are called `IN_FULL` and their name. Observations go to both."""
    graph, known = fast.graph, {_held(constant): constant.name for constant in fast.graph.initializer}
    made = [name for node in full.graph.node for name in node.output]
    names = {name: f"{IN_FULL}{name}" for name in [*made, "noise"]}
    for constant in full.graph.initializer:
        if (held := _held(constant)) in known:
            names[constant.name] = known[held]
            continue
        names[constant.name] = f"{IN_FULL}{constant.name}"
        graph.initializer.add().CopyFrom(constant)
        graph.initializer[-1].name = names[constant.name]
    rename_values(full.graph.node, names)
    graph.node.extend(full.graph.node)
    shared = {item.name for item in graph.input} - {"noise"}
    for items, more in ((graph.input, full.graph.input), (graph.output, full.graph.output)):
        for item in more:
            if item.name not in shared:
                item.name = f"{IN_FULL}{item.name}"
                items.append(item)


def _held(constant: onnx.TensorProto) -> tuple[Any, ...]:
    return constant.data_type, tuple(constant.dims), constant.raw_data


def rename_values(nodes: Any, names: Mapping[str, str]) -> None:
    """Give values other names wherever nodes take or give them, inside a Scan too: what it takes from outside."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            rename_values(attribute.g.node, names)


def _inputs(program: Program) -> dict[str, list[Any]]:
    """What goes in besides the noise: shapes by name."""
    inputs: dict[str, list[Any]] = {
        name: ["moments", "batch", *shape[1:]] if name in program.cameras else ["batch", *shape]
        for name, shape in program.inputs.items()
    }
    if program.cameras:
        inputs[EARLIER_FEATURES] = ["kept", "batch", program.features]
    if TOLD_SCALE in program.weights:
        known = program.tokens - program.executed[0]
        inputs |= {
            PREVIOUS_CHUNK: ["batch", known, program.action_dim],
            LATENCY: ["batch"],
            EXECUTION_HORIZON: ["batch"],
        }
    return inputs


def declared(model: onnx.ModelProto) -> dict[str, dict[str, list[Any]]]:
    """What goes in and out of a model, for its header: shapes by name, as ONNX Runtime gives them."""
    return {
        which: {
            item.name: [size.dim_param or size.dim_value for size in item.type.tensor_type.shape.dim] for item in items
        }
        for which, items in (("inputs", model.graph.input), ("outputs", model.graph.output))
    }
