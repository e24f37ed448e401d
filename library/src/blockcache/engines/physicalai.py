"""An export as a policy package of Intel's physicalai: its manifest, and a graph that its single-pass runner can call.

That runner knows no noise and one observation at a time: the graph draws the noise inside (and gives it out, for anybody to
compare), and where a policy looks at one moment, inputs have no axis of moments. Inputs are called as that project's robot
loop calls them. Actions are NaN where the runtime of blockcache would refuse to act.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from blockcache.errors import EngineError
from blockcache.files import PathLike, read_bytes, write_bytes
from blockcache_runtime import ExportedPolicy
from blockcache_runtime.session import EARLIER_FEATURES, HASH, MOST_BYTES

MANIFEST = "manifest.json"
_FEATURE = "physicalai.inference.data.features.InferenceFeature"
_COINS = 24  # binary digits of a uniform number
_LIMIT = 1e18  # see docs/on-a-robot.md: what `norms` may reach


def write_package(path: PathLike, directory: PathLike, name: str) -> tuple[Path, Path]:
    """Write manifest.json and NAME.onnx, and return where.

    Args:
        path: An export.
        directory: Where the package is to be; it exists.
        name: Of the policy: letters, digits, dots, hyphens and underscores.
    """
    policy = ExportedPolicy(path, 1)
    if policy.takes_previous:
        raise EngineError("a package of physicalai takes no previous chunk; export it without --rtc")
    if policy.watch is not None:
        raise EngineError("a package of physicalai has no guard; export it without --guard")
    names = _names(policy)
    graph, manifest = Path(directory) / f"{name}.onnx", Path(directory) / MANIFEST
    write_bytes(graph, _package_graph(policy, names))
    write_bytes(manifest, json.dumps(_manifest(policy, names, name), indent=2).encode())
    return manifest, graph


def _names(policy: ExportedPolicy) -> dict[str, str]:
    """What that project's robot loop calls each input."""
    states = [name for name in policy.inputs if name not in policy.timeless and name not in policy.cameras]
    found = dict.fromkeys(policy.inputs, "")
    for name in policy.inputs:
        if name in policy.cameras:
            last = name.rpartition(".")[2]
            found[name] = "images" if len(policy.cameras) == 1 else f"images.{last}"
        else:
            found[name] = "state" if [name] == states else name
    if len({*found.values()}) < len(found):
        pairs = ", ".join(f"{name} -> {called}" for name, called in found.items())
        raise EngineError(f"a package of physicalai would call two inputs the same ({pairs}); rename one in the policy")
    return found


def _shape(policy: ExportedPolicy, name: str) -> list[int]:
    """Of an input, without the batch, and without moments where there is one."""
    shape = policy.inputs[name]
    return [*(shape[1:] if policy.n_obs_steps == 1 and name not in policy.timeless else shape)]


def _manifest(policy: ExportedPolicy, names: dict[str, str], name: str) -> dict[str, Any]:
    def feature(kind: str, called: str, shape: list[int]) -> dict[str, Any]:
        return {
            "class_path": _FEATURE,
            "init_args": {"ftype": kind, "shape": shape, "name": called, "dtype": "float32"},
        }

    kinds = {item: "VISUAL" if item in policy.cameras else "STATE" for item in policy.inputs}
    kinds |= dict.fromkeys(policy.timeless, "COMMON")
    action = [policy.n_action_steps, policy.action_dim]
    return {
        "format": "policy_package",
        "version": "1.0",
        "policy": {"name": name, "source": {"repo_id": "", "class_path": ""}},
        "model": {
            "n_obs_steps": policy.n_obs_steps,
            "runner": {"type": "single_pass"},
            "artifacts": {"onnx": f"{name}.onnx"},
            "preprocessors": [{"type": "to_float_tensor"}] if policy.cameras else [],
            "input_features": [feature(kinds[item], names[item], _shape(policy, item)) for item in policy.inputs],
            "output_features": [feature("ACTION", "action", action)],
        },
        "metadata": {
            "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "created_by": policy.header["made_by"],
        },
    }


def _package_graph(policy: ExportedPolicy, names: dict[str, str]) -> bytes:
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load_from_string(read_bytes(policy.path, "ONNX file", MOST_BYTES))
    graph = model.graph
    before, behind = [], []
    for node in graph.node:  # `action` is what leaves the package
        for items in (node.input, node.output):
            for place, item in enumerate(items):
                items[place] = "action_unchecked" if item == "action" else item
    draws, _, horizon, size = policy.sizes["noise"]
    drawing, constants = _drawn(next(iter(names.values())), [draws, 1, horizon, size])
    before += [helper.make_node(*node[:3], **(node[3] if len(node) > 3 else {})) for node in drawing]
    inputs = []
    for name, called in names.items():
        shape = _shape(policy, name)
        inputs.append(helper.make_tensor_value_info(called, 1, [1, *shape]))
        if called == name:
            if shape == [*policy.inputs[name]] and name not in policy.cameras:
                continue
            raise EngineError(f"a package of physicalai cannot have an input that is called {name!r} in the policy too")
        given = called
        if policy.n_obs_steps == 1 and name not in policy.timeless:
            axis = numpy_helper.from_array(np.array([0 if name in policy.cameras else 1]), f"{called}.axis")
            graph.initializer.append(axis)
            before.append(helper.make_node("Unsqueeze", [given, axis.name], [name]))
        elif name in policy.cameras:  # moments before the batch
            before.append(helper.make_node("Transpose", [given], [name], perm=[1, 0, 2, 3, 4]))
        else:
            before.append(helper.make_node("Identity", [given], [name]))
    checked = ["norms"]
    if policy.cameras:
        features = policy._loaded.encoder.features  # type: ignore[union-attr]
        graph.initializer.append(numpy_helper.from_array(np.zeros((0, 1, features), np.float32), EARLIER_FEATURES))
        behind.append(helper.make_node("ReduceL2", ["features"], ["features.norm"], keepdims=0))
        behind.append(helper.make_node("Max", ["norms", "features.norm"], ["all.norms"]))
        checked = ["all.norms"]
    constants |= {"norms.limit": np.array([_LIMIT], np.float32), "norms.nothing": np.array([np.nan], np.float32)}
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    behind.append(helper.make_node("LessOrEqual", [*checked, "norms.limit"], ["norms.right"]))
    behind.append(helper.make_node("Where", ["norms.right", "action_unchecked", "norms.nothing"], ["action"]))
    nodes = [*before, *graph.node, *behind]
    for field, items in (("node", nodes), ("input", inputs)):
        graph.ClearField(field)
        getattr(graph, field).extend(items)
    graph.ClearField("output")
    graph.output.append(helper.make_tensor_value_info("action", 1, [1, policy.n_action_steps, policy.action_dim]))
    graph.output.append(helper.make_tensor_value_info("noise", 1, [draws, 1, horizon, size]))
    kept = [entry for entry in model.metadata_props if entry.key != HASH]
    model.ClearField("metadata_props")
    model.metadata_props.extend(kept)
    return bytes(model.SerializeToString())


def _drawn(given: str, shape: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """Nodes that draw normal numbers, and their constants.

    ONNX Runtime has no kernel of its random operators at opset 23 but Dropout's: 48 coins become two uniform numbers, and
    these a normal one (Box and Muller). `given`, an input, keeps it from drawing once while it loads.
    """
    single = np.float32
    constants = {
        "draw.shape": np.array([*shape, 2, _COINS]),
        "draw.half": np.array(0.5, single),
        "draw.train": np.array(True),
        "draw.one": np.array(1, single),
        "draw.weights": 0.5 ** np.arange(1, _COINS + 1, dtype=single),
        "draw.least": np.array(0.5 ** (_COINS + 1), single),
        "draw.minus_two": np.array(-2, single),
        "draw.circle": np.array(2 * np.pi, single),
        "draw.axis": np.array([-1]),
    }
    nodes = [
        ("IsNaN", [given], ["draw.odd"]),
        ("Cast", ["draw.odd"], ["draw.number"], {"to": 1}),
        ("ReduceMax", ["draw.number"], ["draw.most"], {"keepdims": 0}),
        ("Max", ["draw.most", "draw.one"], ["draw.always_one"]),
        ("Expand", ["draw.always_one", "draw.shape"], ["draw.ones"]),
        (
            "Dropout",
            ["draw.ones", "draw.half", "draw.train"],
            ["draw.dropped", "draw.mask"],
        ),  # the mask: or it is cut out
        ("Cast", ["draw.mask"], ["draw.coins"], {"to": 1}),
        ("MatMul", ["draw.coins", "draw.weights"], ["draw.fractions"]),
        ("Add", ["draw.fractions", "draw.least"], ["draw.uniform"]),
        ("Split", ["draw.uniform"], ["draw.first", "draw.second"], {"axis": -1, "num_outputs": 2}),
        ("Log", ["draw.first"], ["draw.log"]),
        ("Mul", ["draw.log", "draw.minus_two"], ["draw.square"]),
        ("Sqrt", ["draw.square"], ["draw.radius"]),
        ("Mul", ["draw.second", "draw.circle"], ["draw.angle"]),
        ("Cos", ["draw.angle"], ["draw.cosine"]),
        ("Mul", ["draw.radius", "draw.cosine"], ["draw.normal"]),
        ("Squeeze", ["draw.normal", "draw.axis"], ["noise"]),
    ]
    return nodes, constants
