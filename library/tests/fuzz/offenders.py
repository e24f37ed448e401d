"""Files that once were read wrongly, as the change that made each of them; all are tried in every run of the tests.

Kept small: one of each kind, in words that say what went wrong then.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .frames import many_empty_lists, picture_of
from .mutations import join_safetensors, raw, split_safetensors, write_json


@dataclass(frozen=True)
class Offender:
    """format, and the end of the name of its file; what happened; how the file came about."""

    format: str
    file: str
    what: str
    change: Callable[[bytes], bytes]


def put(value: Any, *path: Any) -> Callable[[bytes], bytes]:
    """A JSON file with another value in one place."""
    return lambda data: write_json(_put(json.loads(data), path, value))


def put_header(value: Any, *path: Any, entry: str = "blockcache") -> Callable[[bytes], bytes]:
    """A safetensors file with another value in our own header."""

    def change(data: bytes) -> bytes:
        header, body = split_safetensors(data)
        inner = _put(json.loads(header["__metadata__"][entry]), path, value)
        header["__metadata__"][entry] = write_json(inner).decode()
        return join_safetensors(write_json(header), body)

    return change


def put_tensors(value: Any, *path: Any) -> Callable[[bytes], bytes]:
    """A safetensors file with another value in its own header."""

    def change(data: bytes) -> bytes:
        header, body = split_safetensors(data)
        return join_safetensors(write_json(_put(header, path, value)), body)

    return change


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return tree


def put_array(value: Any, name: str) -> Callable[[bytes], bytes]:
    """An .npz file with another array, or with other bytes, under one name."""

    def change(data: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
            for entry in old.namelist():
                new.writestr(entry, _npy(value) if entry == f"{name}.npy" else old.read(entry))
        return buffer.getvalue()

    return change


def _npy(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


def put_pickle(piece: bytes) -> Callable[[bytes], bytes]:
    """A checkpoint whose pickle makes something first and throws it away."""

    def change(data: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
            for entry in old.namelist():
                content = old.read(entry)
                new.writestr(entry, content[:2] + piece + content[2:] if entry.endswith("data.pkl") else content)
        return buffer.getvalue()

    return change


_HUGE_NPY = (
    b"\x93NUMPY\x01\x00F\x00" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}".ljust(69) + b"\n"
)


def rewire(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """An export whose model was edited."""

    def edit(data: bytes) -> bytes:
        import onnx

        model = onnx.load_from_string(data)
        change(model)
        return model.SerializeToString()

    return edit


def _empty_an_input(model: Any) -> None:
    node = next(node for node in _nodes(model.graph) if node.op_type == "Sum")
    node.input[1] = ""


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)


def _widen_a_frame(model: Any) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Conv")
    next(item for item in node.attribute if item.name == "pads").ints[:] = [10**5] * 4


def _negate_a_weight(model: Any) -> None:
    tensor = max(model.graph.initializer, key=lambda item: len(item.raw_data))
    tensor.raw_data = tensor.raw_data[:3] + bytes([tensor.raw_data[3] ^ 0x80]) + tensor.raw_data[4:]


def _change_the_schedule(model: Any) -> None:
    item = next(item for item in model.metadata_props if item.key == "blockcache")
    item.value = write_json(_put(json.loads(item.value), ("executed",), ["1", None])).decode()


def _loop_for_ever(model: Any) -> None:
    """The observation goes through a loop that hands it on and never has enough."""
    from onnx import TensorProto, helper

    (obs,) = (item for item in model.graph.input if item.name != "noise")
    for node in model.graph.node:
        node.input[:] = ["looped" if name == obs.name else name for name in node.input]
    kinds = {"i": TensorProto.INT64, "on": TensorProto.BOOL, "in": TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(name, kind, None if name == "in" else []) for name, kind in kinds.items()]
    outputs = [helper.make_tensor_value_info("go", TensorProto.BOOL, []), helper.make_tensor_value_info("out", 1, None)]
    nodes = [helper.make_node("Identity", ["on"], ["go"]), helper.make_node("Identity", ["in"], ["out"])]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    model.graph.initializer.append(helper.make_tensor("always", TensorProto.BOOL, [], [True]))
    model.graph.node.insert(
        0, helper.make_node("Loop", ["", "always", obs.name], ["looped"], body=body, name="endless")
    )


def _pad_by_millions(model: Any) -> None:
    """16 million tokens in front of the conditions: 4 GB at the first call."""
    from onnx import numpy_helper

    pad = next(node for node in model.graph.node if node.op_type == "Pad")
    constant = next(item for item in model.graph.initializer if item.name == pad.input[1])
    grown = np.where(numpy_helper.to_array(constant) > 0, 2**24, 0)
    constant.CopyFrom(numpy_helper.from_array(grown, constant.name))


OFFENDERS = (
    Offender("schedule", ".json", "a step that is a text of 100,000 letters was printed in full", put("x" * 100_000, "updates", "layers.0.SA", 0)),
    Offender("schedule", ".json", "so was a key that nobody knows", put(0, "x" * 10_000)),
    Offender("schedule", ".json", "and a width in the difference to a policy", put("x" * 10_000, "fingerprint", "widths", "width")),
    Offender("schedule", ".json", "lists a hundred thousand deep", put(raw("[" * 100_000 + "]" * 100_000), "origin")),
    Offender("schedule", ".json", "a number that is infinite once it is read", put(raw("1e999"), "origin", "x")),
    Offender("schedule", ".json", "half of a letter, which cannot be written back", put(raw('"\\ud800"'), "origin", "x")),
    Offender("sampler", "dpmsolver.json", "a whole number of 400 digits: OverflowError", put(10**400, "sampler", "timesteps", 0)),
    Offender("recording", ".safetensors", "a block's name that is a list: TypeError in solve", put_header([], "blocks", 0, "name")),
    Offender("analysis", ".safetensors", "a lag beyond the steps: a curve of nothing", put_header([10**9], "sections", "similarity", "lags")),
    Offender("policy", "config.json", "a network of 10^12 inputs was built before the weights were looked at", put(10**12, "obs_dim")),
    Offender("policy", "config.json", "100 million layers took all memory", put(10**8, "n_layer")),
    Offender("policy", "config.json", "a width of 400 digits: TypeError of torch", put(10**400, "n_emb")),
    Offender("checkpoint", "ddpm.ckpt", "open, as old pickles call it, passed for data", put_pickle(b"cio\nopen\n(S'ran'\ntR0")),
    Offender("checkpoint", "ddpm.ckpt", "a key of tuples 100,000 deep, whose hash takes the whole stack", put_pickle(b"})" + b"\x85" * 100_000 + b"Ns0")),
    Offender("checkpoint", "ddim.ckpt", "a list of half of its values: the stack was that below the mark", put_pickle(b"(K\x01K\x02l0(K\x01t0")),
    Offender("demonstrations", "plain.npz", "an entry that is no array: AttributeError", put_array(b"text", "action")),
    Offender("demonstrations", "plain.npz", "numbers beyond single precision became infinite", put_array(np.full((8, 3), 1e300), "obs")),
    Offender("demonstrations", "plain.npz", "7 TB by its header: MemoryError", put_array(_HUGE_NPY, "obs")),
    Offender("demonstrations", "pusht.npz", "states in one row: IndexError", put_array(np.zeros(8), "state")),
    Offender("observations", ".npz", "an entry that is no array: AttributeError", put_array(b"text", "obs")),
    Offender("observations", ".npz", "7 TB by its header: MemoryError", put_array(_HUGE_NPY, "obs")),
    Offender("training-state", ".safetensors", "a step that is a text went on until it was counted", put_header("1", "progress", "step", entry="header")),
    Offender("training-state", ".safetensors", "a loss that is a list", put_header([0], "progress", "loss", entry="header")),
    Offender("results", ".json", "a seed that is an object: TypeError in the report", put({}, "records", 0, "seed")),
    Offender("results", ".json", "a score that is a list", put([0.5], "records", 0, "score")),
    Offender("results", ".json", "a method without a name", put(None, "methods", 0, "name")),
    Offender("results", ".json", "an engine of two lines: ValueError in the table", put("a\nb", "methods", 1, "engine")),
    Offender("timings", ".json", "as suites: seconds that are texts", put(["x"], "methods", "full", "seconds")),
    Offender("suites", "timings.json", "seconds that are texts", put(["x"], "methods", "full", "seconds")),
    Offender("suites", "timings.json", "no seconds at all", put([], "methods", "full", "seconds")),
    Offender("suites", "metrics.json", "a cell that is a number", put(3, "setting", "suite", "cells", 0)),
    Offender("suites", "metrics.json", "a cell of a method that was not run: KeyError", put("x", "setting", "suite", "cells", 0, "method")),
    Offender("suites", "metrics.json", "a title of two lines: ValueError", put("a\nb", "setting", "suite", "cells", 0, "section")),
    Offender("suites", "metrics.json", "no FLOPs, as a family that does not say them: ZeroDivisionError", put(0, "methods", 1, "flops")),
    Offender("jobs", ".json", "an outcome without anything: KeyError", put({}, "outcome")),
    Offender("jobs", ".json", "an outcome whose records are a number: TypeError", put({"records": 3}, "outcome")),
    Offender("jobs", ".json", "an outcome whose actions are of another shape", put({"actions": [[0.5]], "reused": 0.0}, "outcome")),
    Offender("stored result", ".json", "an estimate that is a text", put("x", "methods", 0, "score", "mean")),
    Offender("DiT config", "config.json", "as policy: 100 million layers", put(10**8, "num_layers")),
    Offender("DiT weights", ".safetensors", "as policy: a tensor that ends before it begins", put_tensors([320, 64], "noise_predictor.input_proj.weight", "data_offsets")),
    Offender("LeRobot config", "config.json", "as policy: numbers of 10^12 in a state", put([10**12], "input_features", "observation.state", "shape")),
    Offender("LeRobot weights", ".safetensors", "as policy: a shape of another size", put_tensors([10**12, 4], "noise_predictor.input_proj.weight", "shape")),
    Offender("LeRobot processor", ".json", "steps that are a number", put(3, "steps")),
    Offender("LeRobot statistics", ".safetensors", "a number type that nobody knows", put_tensors("F31", "action.max", "dtype")),
    Offender("rdt state dict", ".pt", "as checkpoint: open, as old pickles call it", put_pickle(b"cio\nopen\n(S'ran'\ntR0")),
    Offender("performance", ".json", "a number of 400 digits: OverflowError in the page", put(10**400, "bench", "rows", 0, "p50_ms")),
    Offender("check", ".json", "a number of 400 digits", put(10**400, "distances", "centre_shift", "mean")),
    Offender("tuning", ".json", "a spread of one number: IndexError", put([0], "goal", "spread")),
    Offender("distances", ".json", "a share that is a text", put("x", "methods", "fitted-3", "modes", "found")),
    Offender("losses", ".json", "a feature of 400 digits", put(10**400, "rows", 0, "features", "rougher")),
    Offender("loss model", ".json", "a factor that is a text", put("x", "factor")),
    Offender("guard", ".json", "a score that is a text", put("x", "rows", 0, "scores")),
    Offender("parity", ".json", "a difference that is a text", put("x", "largest")),
    Offender("reference", ".npz", "cut in the middle", lambda data: data[: len(data) // 2]),
    Offender("tuning state", ".json", "a machine that is a list", put([], "machine")),
    Offender("benchmark", ".json", "a row that is a list", put([], "rows", 0)),
    Offender("export", "scheduled.onnx", "one flipped bit of a weight: other actions", rewire(_negate_a_weight)),
    Offender("export", "full.onnx", "a node without its input: segmentation fault", rewire(_empty_an_input)),
    Offender("export", "scheduled.onnx", "executed actions that are no numbers", rewire(_change_the_schedule)),
    Offender("export", "full.onnx", "a loop that never ends", rewire(_loop_for_ever)),
    Offender("forged-export", "full.onnx", "the same, with a hash that fits", rewire(_loop_for_ever)),
    Offender("forged-export", "full.onnx", "padding that takes 4 GB at the first call", rewire(_pad_by_millions)),
    Offender("forged-export", "full.onnx", "a node without its input, with a hash that fits", rewire(_empty_an_input)),
    Offender("camera-export", "cameras.onnx", "a border that makes 160 GB of a frame", rewire(_widen_a_frame)),
    Offender("openpi message", "plain.msgpack", "lists that become a hundred times as large", lambda _: many_empty_lists()),
    Offender("openpi message", "plain.msgpack", "an array of objects", lambda data: data.replace(b"<f4", b"|O8")),
    Offender("vla-eval message", "observation.msgpack", "a picture of gigabytes", lambda _: picture_of(20_000, 20_000)),
)  # fmt: skip
