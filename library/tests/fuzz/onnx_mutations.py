"""Ways to damage an ONNX file: any bytes, its header, and nodes, names and numbers of its graph. Knows nothing of ours."""

from __future__ import annotations

import json
import random
from typing import Any

from .mutations import Mutated, bytewise, flip, tree, write_json


def onnx_file(data: bytes, chance: random.Random) -> Mutated:
    """Anything of it; the header; nodes, names and numbers of the graph."""
    import onnx

    way = chance.choice(["bytes", "bytes", "header", "graph", "graph", "graph"])
    if way == "bytes":
        return bytewise(data, chance)
    model = onnx.load_from_string(data)
    if way == "header":
        place = chance.randrange(len(model.metadata_props))
        item = model.metadata_props[place]
        if chance.random() < 0.15:
            note = chance.choice(["gone", "renamed", "twice"])
            if note == "renamed":
                item.key = item.key + "x"
            elif note == "twice":
                model.metadata_props.append(item)
            else:
                del model.metadata_props[place]
        else:
            changed, note = (
                tree(json.loads(item.value), chance) if item.value.startswith("{") else ("x" + item.value, "x")
            )
            item.value = (write_json(changed) if item.value.startswith("{") else changed.encode()).decode()
    else:
        note = _graph(model.graph, chance)
    return model.SerializeToString(), f"{way}: {note}"


_OPERATORS = (
    "Identity",
    "Neg",
    "Relu",
    "Loop",
    "Scan",
    "If",
    "MatMul",
    "Add",
    "NoSuchThing",
    "",
    "RandomNormalLike",
    "Constant",
)


def _graph(graph: Any, chance: random.Random) -> str:
    from onnx import TensorProto

    if chance.random() < 0.25 and graph.initializer:
        tensor = chance.choice(graph.initializer)
        way = chance.choice(["values", "values", "shape", "type", "gone", "outside"])
        if way == "values" and tensor.raw_data:
            tensor.raw_data = flip(tensor.raw_data, chance)[0]
        elif way == "shape":
            tensor.dims.append(chance.choice([1, 2, 0, -1, 10**12]))
        elif way == "type":
            tensor.data_type = chance.choice([0, 1, 6, 7, 8, 10, 11, 99])
        elif way == "outside":  # says that its values are in another file
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=chance.choice(["x", "../../etc/passwd", ""]))
        else:
            graph.initializer.remove(tensor)
        return f"initializer {way}"
    holder = chance.choice(list(_graphs(graph)))
    if not holder.node or chance.random() < 0.15:
        way = chance.choice(["input", "output"])
        item = chance.choice(graph.input if way == "input" else graph.output)
        shape = item.type.tensor_type.shape.dim
        what = chance.choice(["name", "size", "type", "rank", "gone"])
        if what == "name":
            item.name = chance.choice(["", "obs", "noise", "action", item.name + "x"])
        elif what == "size" and shape:
            chance.choice(shape).dim_value = chance.choice([0, 1, 3, -1, 10**12])
        elif what == "type":
            item.type.tensor_type.elem_type = chance.choice([0, 7, 8, 11])
        elif what == "rank":
            shape.add(dim_value=1)
        else:
            (graph.input if way == "input" else graph.output).remove(item)
        return f"{way} {what}"
    node = chance.choice(holder.node)
    way = chance.choice(["gone", "operator", "emptied", "swapped", "rewired", "attribute", "domain", "twice", "moved"])
    if way == "gone":
        holder.node.remove(node)
    elif way == "operator":
        node.op_type = chance.choice(_OPERATORS)
    elif way == "emptied" and node.input:
        node.input[chance.randrange(len(node.input))] = ""
    elif way == "swapped" and len(node.input) > 1:
        node.input[0], node.input[1] = node.input[1], node.input[0]
    elif way == "rewired" and node.input:
        names = [name for other in holder.node for name in other.output]
        node.input[chance.randrange(len(node.input))] = chance.choice(names)
    elif way == "attribute" and node.attribute:
        attribute = chance.choice(node.attribute)
        attribute.i, attribute.f = chance.choice([-1, 0, 3, 10**12]), chance.choice([0.0, -1.0, float("nan")])
        if attribute.ints:
            attribute.ints[0] = chance.choice([-1, 5, 10**12])
    elif way == "domain":
        node.domain = chance.choice(["com.microsoft", "x", "ai.onnx.ml"])
    elif way == "twice":
        holder.node.append(node)
    else:
        holder.node.insert(0, node)
    return f"{node.op_type} {way}"


def _graphs(graph: Any) -> Any:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
