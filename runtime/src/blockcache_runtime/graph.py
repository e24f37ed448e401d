"""What an export may consist of, checked before anything is made of it. Knows nothing of ONNX Runtime and of policies.

A graph of ours is a plain list of a few operators, in order. So all else is refused: other operators (a Loop need not
end), operators of other domains, functions, data outside the file, inputs that are missing (ONNX Runtime does not look
whether they are there), names that nothing defines or that two things do. `OPERATORS` is the one list; whoever has the ONNX
backend write something new adds it here, and `check_model` runs on everything that is exported.
"""

from __future__ import annotations

import reprlib
from collections.abc import Container
from dataclasses import dataclass
from math import prod

from blockcache_runtime.errors import ContentError
from blockcache_runtime.protobuf import BYTES, FLOAT, MOST_FIELDS, WHOLE, Field, read_fields, tag

MANY = 2**31
_MOST_AXES = 8
_MOST_ITEMS = 2**24
"""Along an axis, wherever a size or a place is written: ONNX Runtime takes seconds to load 2**31, and hours for more."""
_MOST_PADDED = 1024
"""In front of an axis or behind it: we pad by one token, and padding is the operator that makes much out of nothing."""
_FLOAT32, _INT64 = 1, 7
_ITEM_BYTES = {_FLOAT32: 4, _INT64: 8}


@dataclass(frozen=True)
class Operator:
    """How a node of it looks: the least and the most inputs and outputs, none of them left out, and its attributes."""

    inputs: tuple[int, int]
    attributes: tuple[str, ...] = ()
    outputs: tuple[int, int] = (1, 1)


OPERATORS = {
    "Add": Operator((2, 2)),
    "Attention": Operator((3, 4), ("q_num_heads", "kv_num_heads", "is_causal", "scale")),
    "Clip": Operator((3, 3)),
    "Concat": Operator((1, MANY), ("axis",)),
    "Conv": Operator((2, 2), ("kernel_shape", "strides", "pads")),
    "Cos": Operator((1, 1)),
    "Div": Operator((2, 2)),
    "Gelu": Operator((1, 1), ("approximate",)),
    "Gemm": Operator((3, 3), ("alpha", "beta")),
    "Identity": Operator((1, 1)),
    "InstanceNormalization": Operator((3, 3), ("epsilon",)),
    "LayerNormalization": Operator((2, 2), ("axis", "epsilon")),
    "MatMul": Operator((2, 2)),
    "MaxPool": Operator((1, 1), ("kernel_shape", "strides", "pads")),
    "Mish": Operator((1, 1)),
    "Mul": Operator((2, 2)),
    "Pad": Operator((2, 2)),
    "ReduceL2": Operator((1, 1)),
    "ReduceMean": Operator((2, 2)),
    "Relu": Operator((1, 1)),
    "Reshape": Operator((2, 2)),
    "Scan": Operator((3, MANY), ("body", "num_scan_inputs"), (2, MANY)),  # ends with the rows of its inputs
    "Sigmoid": Operator((1, 1)),
    "Sin": Operator((1, 1)),
    "Slice": Operator((4, 4)),
    "Softmax": Operator((1, 1), ("axis",)),
    "Split": Operator((1, 1), ("axis", "num_outputs"), (2, MANY)),
    "Sqrt": Operator((1, 1)),
    "Sub": Operator((2, 2)),
    "Sum": Operator((3, MANY)),
    "Transpose": Operator((1, 1), ("perm",)),
}
_COUNTS = {"q_num_heads", "kv_num_heads", "num_outputs"}
_WINDOWS = {"kernel_shape": 1, "strides": 1, "pads": 0}
"""Lists of whole numbers and the least of each: ONNX Runtime divides by strides, and pads are something out of nothing."""
_MOST_WINDOW = 64
_OPERATORS = {name.encode(): operator for name, operator in OPERATORS.items()}

# fields of ONNX's messages, as far as we write them
_IR_VERSION, GRAPH, _OPSET, METADATA = tag(1, WHOLE), tag(7, BYTES), tag(8, BYTES), tag(14, BYTES)
NODE, _GRAPH_NAME, CONSTANT, GIVEN, RESULT = (tag(number, BYTES) for number in (1, 2, 5, 11, 12))
_INPUT, _OUTPUT, _KIND, _ATTRIBUTE = (tag(number, BYTES) for number in (1, 2, 4, 5))
_DIM, _TYPE, TENSOR_NAME, _RAW = tag(1, WHOLE), tag(2, WHOLE), tag(8, BYTES), tag(9, BYTES)
DECLARED_NAME, _DECLARED = tag(1, BYTES), tag(2, BYTES)
_NAME = DECLARED_NAME
_WHOLE_NUMBER, _BODY, _LISTED, _KIND_OF_VALUE = tag(3, WHOLE), tag(6, BYTES), tag(8, WHOLE), tag(20, WHOLE)
_VALUES = {_WHOLE_NUMBER, _KIND_OF_VALUE, tag(2, FLOAT), tag(4, BYTES), _LISTED}  # float and text among them
_TO_A_SIZE = (tag(2, BYTES), tag(1, BYTES), tag(2, BYTES), tag(1, BYTES))  # type, tensor_type, shape, dim
_KEY, _VALUE = tag(1, BYTES), tag(2, BYTES)


def read_metadata(data: bytes) -> dict[str, str]:
    """The metadata of a serialised model; ContentError if the bytes are none."""
    found = {}
    for key, begin, end in read_fields(data, 0, len(data)):
        if key == METADATA:
            entry = {which: data[start:stop] for which, start, stop in read_fields(data, begin, end)}
            try:
                found[entry[_KEY].decode()] = entry[_VALUE].decode()
            except (KeyError, UnicodeDecodeError) as error:
                raise ContentError("an entry of its metadata is not a key and a value") from error
    return found


def wires(data: bytes, begin: int, end: int) -> tuple[list[bytes], list[bytes]]:
    """What a node of a checked graph takes and what it gives, by name."""
    fields = read_fields(data, begin, end)
    taken, given = ([data[start:stop] for key, start, stop in fields if key == kind] for kind in (_INPUT, _OUTPUT))
    return taken, given


def check_model(data: bytes) -> None:
    """Refuse a serialised model that holds anything that we do not write, with a ContentError that names it."""
    graphs = []
    for key, begin, end in read_fields(data, 0, len(data)):
        if key == GRAPH:
            graphs.append((begin, end))
        elif key not in (_IR_VERSION, _OPSET, METADATA):
            raise _unknown("model", key)
    if len(graphs) != 1:
        raise ContentError(f"it has {len(graphs)} graphs, expected one")
    _Walk(data).graph(*graphs[0], known=set())


class _Walk:
    """Goes through a model once. Names are compared as bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left, self._scans = MOST_FIELDS, 0
        self._attributes: dict[tuple[bytes, bytes], tuple[str, int]] = {}  # few of them are different
        self._largest: dict[bytes, int] = {}  # by the name of a constant of whole numbers

    def _fields(self, begin: int, end: int) -> list[Field]:
        fields = read_fields(self._data, begin, end, self._left)
        self._left -= len(fields)
        return fields

    def graph(self, begin: int, end: int, known: set[bytes]) -> int:
        """Check a graph inside which `known` is defined, and return how many inputs it has."""
        nodes, results, inputs = [], [], 0
        for key, start, stop in self._fields(begin, end):
            if key == NODE:
                nodes.append((start, stop))
            elif key == CONSTANT:
                _define(known, self._constant(start, stop))
            elif key == GIVEN:
                _define(known, self._declared(start, stop))
                inputs += 1
            elif key == RESULT:
                results.append(self._declared(start, stop))
            elif key != _GRAPH_NAME:
                raise _unknown("graph", key)
        for start, stop in nodes:
            self._node(start, stop, known)
        if missing := [name for name in results if name not in known]:
            raise ContentError(f"nothing in it gives its output {_shown(missing[0])}")
        return inputs

    def _node(self, begin: int, end: int, known: set[bytes]) -> None:
        data, kind = self._data, b""
        inputs, outputs, attributes = [], [], []
        for key, start, stop in self._fields(begin, end):
            if key == _INPUT:
                inputs.append(data[start:stop])
            elif key == _OUTPUT:
                outputs.append(data[start:stop])
            elif key == _KIND:
                kind = data[start:stop]
            elif key == _ATTRIBUTE:
                attributes.append((start, stop))
            else:
                raise _unknown("node", key)
        operator = _OPERATORS.get(kind)
        if operator is None:
            raise ContentError(f"it uses the operator {_shown(kind)}, which blockcache does not write")
        if not operator.inputs[0] <= len(inputs) <= operator.inputs[1]:
            raise ContentError(f"its {kind.decode()} has {len(inputs)} inputs")
        if not operator.outputs[0] <= len(outputs) <= operator.outputs[1]:
            raise ContentError(f"its {kind.decode()} has {len(outputs)} outputs")
        for name in inputs:
            if name not in known:
                raise ContentError(f"its {kind.decode()} takes {_shown(name)}, which nothing before it gives")
        if kind == b"Pad" and self._largest.get(inputs[1], MANY) > _MOST_PADDED:
            raise ContentError(f"its Pad adds more than {_MOST_PADDED:,} places, or nobody knows how many")
        if kind == b"Scan":
            self._scan(attributes, len(inputs), known)
        elif attributes:
            self._check_attributes(kind, attributes, len(outputs))
        for name in outputs:
            _define(known, name)

    def _check_attributes(self, kind: bytes, attributes: list[tuple[int, int]], outputs: int) -> None:
        found = {}
        for begin, end in attributes:
            content = self._data[begin:end]
            if (kind, content) not in self._attributes:
                self._attributes[kind, content] = self._attribute(kind, begin, end)
            name, number = self._attributes[kind, content]
            found[name] = number
        if len(found) != len(attributes):
            raise ContentError(f"its {kind.decode()} has an attribute twice")
        if found.get("num_outputs", outputs) != outputs:  # ONNX Runtime would write where it has no place to
            raise ContentError(f"its {kind.decode()} has {outputs} outputs and says that it has others")

    def _attribute(self, kind: bytes, begin: int, end: int) -> tuple[str, int]:
        """Its name, and its value if that is a whole number."""
        number, listed = 0, list[int]()
        for key, start, _ in self._fields(begin, end):
            if key == _WHOLE_NUMBER:
                number = start
            elif key == _LISTED:
                listed.append(start)
        name = self._name(begin, end, _VALUES).decode(errors="replace")
        if name not in _OPERATORS[kind].attributes:
            raise ContentError(f"its {kind.decode()} has the attribute {reprlib.repr(name)}")
        if name in _COUNTS and not 0 < number < MANY:  # ONNX Runtime divides by some of them
            raise ContentError(f"its {kind.decode()} has {name} {number}")
        if name in _WINDOWS and not all(_WINDOWS[name] <= size <= _MOST_WINDOW for size in listed or [MANY]):
            raise ContentError(f"its {kind.decode()} has {name} {reprlib.repr(listed)}")
        return name, number

    def _scan(self, attributes: list[tuple[int, int]], inputs: int, known: set[bytes]) -> None:
        """A Scan ends with the rows of its inputs, if it has any. There is one at most, so none inside it."""
        self._scans += 1
        bodies, rows = [], 0
        for begin, end in attributes:
            for key, start, stop in self._fields(begin, end):
                if key == _BODY:
                    bodies.append((start, stop))
                elif key == _WHOLE_NUMBER:
                    rows = start
                elif key not in (_NAME, _KIND_OF_VALUE):
                    raise _unknown("Scan", key)
        if self._scans > 1 or len(attributes) != 2 or len(bodies) != 1 or not 1 <= rows < inputs:
            raise ContentError("it repeats a step in another way than blockcache writes")
        if self.graph(*bodies[0], known=known.copy()) != inputs:
            raise ContentError("its Scan and the step inside it have different numbers of inputs")

    def _constant(self, begin: int, end: int) -> bytes:
        """A constant must lie in the file as a whole; its name."""
        name, dims, kind, raw = b"", [], 0, memoryview(b"")
        for key, start, stop in self._fields(begin, end):
            if key == _DIM:
                dims.append(start)
            elif key == _TYPE:
                kind = start
            elif key == TENSOR_NAME:
                name = self._data[start:stop]
            elif key == _RAW:
                raw = memoryview(self._data)[start:stop]
            else:
                raise _unknown("constant", key)
        if len(dims) > _MOST_AXES or not raw or prod(dims) * _ITEM_BYTES.get(kind, -1) != len(raw):
            raise ContentError(f"its constant {_shown(name)} is not as large as its type and shape say")
        if kind == _INT64:
            self._largest[name] = max(map(abs, raw.cast("q")))
            if self._largest[name] > _MOST_ITEMS:
                raise ContentError(f"its constant {_shown(name)} holds a number beyond {_MOST_ITEMS:,}")
        return name

    def _declared(self, begin: int, end: int) -> bytes:
        """The name of an input or output, whose type is type.tensor_type.shape.dim.dim_value."""
        spans = [(begin, end)]
        for wanted in _TO_A_SIZE:
            spans = [(start, stop) for span in spans for key, start, stop in self._fields(*span) if key == wanted]
        if any(key == _DIM and size > _MOST_ITEMS for span in spans for key, size, _ in self._fields(*span)):
            raise ContentError(f"one of its inputs or outputs has a size beyond {_MOST_ITEMS:,}")
        return self._name(begin, end)

    def _name(self, begin: int, end: int, others: Container[int] = (_DECLARED,)) -> bytes:
        """The name of an attribute or of a value that is declared, beside the `others` of its fields."""
        name = b""
        for key, start, stop in self._fields(begin, end):
            if key == _NAME:
                name = self._data[start:stop]
            elif key not in others:
                raise _unknown("attribute or declared value", key)
        return name


def _define(known: set[bytes], name: bytes) -> None:
    if not name or name in known:
        raise ContentError(
            f"the name {_shown(name)} in it stands for two things" if name else "a value in it has no name"
        )
    known.add(name)


def _unknown(what: str, key: int) -> ContentError:
    return ContentError(f"its {what} has field {key >> 3} of ONNX, which blockcache does not write")


def _shown(name: bytes) -> str:
    return reprlib.repr(name.decode(errors="replace"))
