"""Nodes and initializers of an ONNX graph under construction. Knows nothing of what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Writer:
    """Nodes and initializers under construction; names are given out in order."""

    def __init__(self, outer: Writer | None = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = outer.initializers if outer else {}
        self._prefix = "s" if outer else "t"
        self._count = 0

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.nodes_out(kind, 1, *inputs, **attributes)[0]

    def nodes_out(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        names = [f"{self._prefix}{self._count + index}" for index in range(outputs)]
        self._count += outputs
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def constant(self, value: Any, name: str | None = None) -> str:
        """An initializer: float32, or int64 for whole numbers. A given name stands for one value for ever."""
        array = np.asarray(value)
        array = array.astype(np.int64) if array.dtype.kind in "iu" else array.astype(np.float32)
        if name is None:
            whole = array.dtype == np.int64
            name = f"i{'_'.join(map(str, array.ravel()))}" if whole else f"c{len(self.initializers)}"
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def reshape(self, value: str, *shape: int) -> str:
        return self.node("Reshape", value, self.constant(list(shape)))

    def add(self, values: Sequence[str]) -> str:
        """The sum of one or more tensors, in one node."""
        if len(values) == 1:
            return values[0]
        return self.node("Add" if len(values) == 2 else "Sum", *values)

    def scaled(self, value: str, factor: float) -> str:
        return value if factor == 1.0 else self.node("Mul", value, self.constant(float(factor)))

    def split(self, value: str, parts: int, axis: int = 0) -> list[str]:
        if parts == 1:
            return [value]
        return self.nodes_out("Split", parts, value, axis=axis, num_outputs=parts)


def value_info(name: str, shape: Sequence[Any] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
