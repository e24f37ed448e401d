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
import onnx
from onnx import TensorProto, helper, numpy_helper

from blockcache.engines.onnx_backend import GraphWriter, value_info
from blockcache.engines.onnx_graph import rename_values
from blockcache.errors import EngineError
from blockcache.files import PathLike, read_bytes, write_bytes
from blockcache_runtime import ExportedPolicy
from blockcache_runtime.checks import LIMIT
from blockcache_runtime.session import EARLIER_FEATURES, HASH, MOST_BYTES

MANIFEST = "manifest.json"
_FEATURE = "physicalai.inference.data.features.InferenceFeature"
_COINS = 24  # binary digits of a uniform number


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
    model = onnx.load_from_string(read_bytes(policy.path, "ONNX file", MOST_BYTES))
    rename_values(model.graph.node, {"action": "action_unchecked"})  # `action` is what leaves the package
    writer = GraphWriter("package.", {item.name: item for item in model.graph.initializer})
    draws, _, horizon, size = policy.sizes["noise"]
    _draw_normal(writer, next(iter(names.values())), [draws, 1, horizon, size])
    inputs = []
    for name, called in names.items():
        shape = _shape(policy, name)
        inputs.append(value_info(called, [1, *shape]))
        if called == name:
            if shape == [*policy.inputs[name]] and name not in policy.cameras:
                continue
            raise EngineError(f"a package of physicalai cannot have an input that is called {name!r} in the policy too")
        value = called
        if policy.n_obs_steps == 1 and name not in policy.timeless:
            value = writer.node("Unsqueeze", called, writer.constant([0 if name in policy.cameras else 1]))
        elif name in policy.cameras:  # moments before the batch
            value = writer.node("Transpose", called, perm=[1, 0, 2, 3, 4])
        writer.name(value, name)
    writer.nodes += model.graph.node
    norms = "norms"
    if policy.cameras:
        writer.constant(np.zeros((0, 1, policy.header["encoder"].features)), EARLIER_FEATURES)
        norms = writer.node("Max", norms, writer.node("ReduceL2", "features", keepdims=0))
    right = writer.node("LessOrEqual", norms, writer.constant([LIMIT]))
    writer.name(writer.node("Where", right, "action_unchecked", writer.constant([np.nan])), "action")
    action = value_info("action", [1, policy.n_action_steps, policy.action_dim])
    outputs = [action, value_info("noise", [draws, 1, horizon, size])]
    constants = list(writer.initializers.values())
    graph = helper.make_graph(writer.nodes, model.graph.name, inputs, outputs, constants)
    package = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    package.metadata_props.extend(entry for entry in model.metadata_props if entry.key != HASH)
    return bytes(package.SerializeToString())


def _draw_normal(writer: GraphWriter, given: str, shape: list[int]) -> None:
    """Nodes that draw normal numbers, as the value `noise`.

    ONNX Runtime has no kernel of its random operators at opset 23 but Dropout's: 48 coins become two uniform numbers, and
    these a normal one (Box and Muller). `given`, an input, keeps it from drawing once while it loads.
    """
    number = writer.node("Cast", writer.node("IsNaN", given), to=TensorProto.FLOAT)
    one = writer.node("Max", writer.node("ReduceMax", number, keepdims=0), writer.constant(1.0))
    ones = writer.node("Expand", one, writer.constant([*shape, 2, _COINS]))
    scalars = {"package.half": np.array(0.5, np.float32), "package.always": np.array(True)}
    writer.initializers |= {name: numpy_helper.from_array(value, name) for name, value in scalars.items()}
    # the mask is used, not the numbers: or ONNX Runtime would leave Dropout out
    _, mask = writer.several("Dropout", 2, ones, *scalars)
    fractions = writer.node(
        "MatMul", writer.node("Cast", mask, to=TensorProto.FLOAT), writer.constant(0.5 ** np.arange(1, _COINS + 1))
    )
    uniform = writer.node("Add", fractions, writer.constant(0.5 ** (_COINS + 1)))
    first, second = writer.several("Split", 2, uniform, axis=-1, num_outputs=2)
    radius = writer.node("Sqrt", writer.node("Mul", writer.node("Log", first), writer.constant(-2.0)))
    cosine = writer.node("Cos", writer.node("Mul", second, writer.constant(2 * np.pi)))
    normal = writer.node("Squeeze", writer.node("Mul", radius, cosine), writer.constant([-1]))
    writer.name(normal, "noise")
