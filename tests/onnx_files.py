"""Looking into ONNX files: shared by the tests of the onnx engine's file and of its cache."""

import json

import onnx

BLOCKS = tuple(f"layers.{index}.{kind}" for index in (0, 1) for kind in ("SA", "CA", "FFN"))


def nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def header(model):
    return json.loads({item.key: item.value for item in model.metadata_props}["blockcache"])


def with_header(path, **changes):
    """The same file with another header."""
    model = onnx.load(path)
    (item,) = model.metadata_props
    item.value = json.dumps({**header(model), **changes})
    onnx.save(model, path)
