"""Looking into ONNX files, changing them, and making small ones by hand: shared by the tests of exports."""

import json

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import blockcache as bc
from blockcache_runtime import ExportedPolicy
from blockcache_runtime.session import HASH, with_hash

BLOCKS = tuple(f"layers.{index}.{kind}" for index in (0, 1) for kind in ("SA", "CA", "FFN"))


def nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def metadata(model):
    return {item.key: item.value for item in model.metadata_props}


def header(model):
    return json.loads(metadata(model)["blockcache"])


def hashed(model):
    """The bytes of a model with a hash that fits, whatever was done to it."""
    kept = {key: value for key, value in metadata(model).items() if key != HASH}
    helper.set_model_props(model, kept)
    return with_hash(model.SerializeToString())


def opened(data):
    """An export, from its bytes alone."""
    return ExportedPolicy("toy.onnx", 1, data)


def with_header(path, **changes):
    """The same file with another header."""
    model = onnx.load(path)
    helper.set_model_props(model, {"blockcache": json.dumps({**header(model), **changes})})
    path.write_bytes(hashed(model))


def two_inputs(**changes):
    """A model with two observation inputs, whose action is the mean of each over time, side by side, plus the start.

    `changes` are made to its header.
    """
    tensor = lambda name, *shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)  # noqa: E731
    node = helper.make_node
    steps = [node("Split", [name], [f"{name}_0", f"{name}_1"], axis=1, num_outputs=2) for name in ("arm", "ball")]
    steps += [node("Add", [f"{name}_0", f"{name}_1"], [f"sum_{name}"]) for name in ("arm", "ball")]
    steps.append(node("Concat", ["sum_arm", "sum_ball"], ["sums"], axis=2))
    steps.append(node("Mul", ["sums", "half"], ["means"]))
    steps.append(node("ReduceL2", ["means"], ["norm"]))
    steps.append(node("Reshape", ["norm", "flat"], ["norms"]))
    steps.append(node("Reshape", ["noise", "shape"], ["start"]))
    steps.append(node("Add", ["means", "start"], ["action"]))
    inputs = {"noise": [1, "batch", 1, 3], "arm": ["batch", 2, 2], "ball": ["batch", 2, 1]}
    outputs = {"action": ["batch", 1, 3], "norms": [1]}
    half = helper.make_tensor("half", TensorProto.FLOAT, [], b"\0\0\0\x3f", raw=True)
    numbers = {"shape": [-1, 1, 3], "flat": [-1]}
    graph = helper.make_graph(
        steps,
        "toy",
        [tensor(name, *sizes) for name, sizes in inputs.items()],
        [tensor(name, *sizes) for name, sizes in outputs.items()],
        [half, *(numpy_helper.from_array(np.array(value), name) for name, value in numbers.items())],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    said = {"format": "blockcache.onnx", "version": 3, "made_by": "hand", "executed": [0, 1], "output": "action"}
    said |= {"inputs": inputs, "outputs": outputs, "schedule": {}, "origin": {}}
    said |= {"fingerprint": bc.Fingerprint(family="toy").to_dict()}
    helper.set_model_props(model, {"blockcache": json.dumps(said | changes)})
    return model
