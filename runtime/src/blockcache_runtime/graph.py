"""What an export may consist of, checked before anything is made of it. Knows nothing of ONNX Runtime and of policies.

An exported graph is a plain list of a few operators, in order. So all else is refused: other operators (a Loop need not
end), operators of other domains, functions, data outside the file, inputs that are missing (ONNX Runtime does not look
whether they are there), names that nothing defines or that two things do. `OPERATORS` is the one list; whoever has the ONNX
backend write something new adds it here, and `check_model` runs on everything that is exported.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from blockcache_runtime.errors import ContentError
from blockcache_runtime.protobuf import BYTES, FLOAT, MOST_FIELDS, WHOLE, Field, read_fields, tag

Span: TypeAlias = tuple[int, int]

MANY = 2**31
_MOST_AXES = 8
_MOST_ITEMS = 2**24  # along an axis: ONNX Runtime takes seconds to load a constant that says 2**31, and hours for more
_MOST_PADDED = 1024  # before or behind an axis: exports pad by one token, and padding makes much out of nothing
_FLOAT32, _INT64 = 1, 7
_ITEM_BYTES = {_FLOAT32: 4, _INT64: 8}


@dataclass(frozen=True)
class Operator:
    """How a node of it looks: the least and the most inputs and outputs, none of them left out, and its attributes."""

    inputs: tuple[int, int]
    attributes: tuple[str, ...] = ()
    outputs: tuple[int, int] = (1, 1)


_UNARY = ("Cos", "Identity", "Mish", "ReduceL2", "Relu", "Sigmoid", "Sin", "Sqrt")
_BINARY = ("Add", "Div", "MatMul", "Mul", "Pad", "ReduceMean", "Reshape", "Sub")
OPERATORS = {
    **dict.fromkeys(_UNARY, Operator((1, 1))),
    **dict.fromkeys(_BINARY, Operator((2, 2))),
    "Attention": Operator((3, 4), ("q_num_heads", "kv_num_heads", "is_causal", "scale")),
    "Clip": Operator((3, 3)),
    "Concat": Operator((1, MANY), ("axis",)),
    "Conv": Operator((2, 2), ("kernel_shape", "strides", "pads")),
    "Gelu": Operator((1, 1), ("approximate",)),
    "Gemm": Operator((3, 3), ("alpha", "beta")),
    "InstanceNormalization": Operator((3, 3), ("epsilon",)),
    "LayerNormalization": Operator((2, 2), ("axis", "epsilon")),
    "MaxPool": Operator((1, 1), ("kernel_shape", "strides", "pads")),
    "Scan": Operator((3, MANY), ("body", "num_scan_inputs"), (2, MANY)),  # ends with the rows of its inputs
    "Slice": Operator((4, 4)),
    "Softmax": Operator((1, 1), ("axis",)),
    "Split": Operator((1, 1), ("axis", "num_outputs"), (2, MANY)),
    "Sum": Operator((3, MANY)),
    "Transpose": Operator((1, 1), ("perm",)),
}
_COUNTS = {"q_num_heads", "kv_num_heads", "num_outputs"}
_WINDOWS = {"kernel_shape": 1, "strides": 1, "pads": 0}  # lists, and the least of each: ONNX Runtime divides by strides
_MOST_WINDOW = 64
_OPERATORS = {name.encode(): operator for name, operator in OPERATORS.items()}

# fields of ONNX's messages, as far as exports have them
_IR_VERSION, _GRAPH, _OPSET, _METADATA = tag(1, WHOLE), tag(7, BYTES), tag(8, BYTES), tag(14, BYTES)
_NODE, _GRAPH_NAME, _CONSTANT, _GRAPH_INPUT, _GRAPH_OUTPUT = (tag(number, BYTES) for number in (1, 2, 5, 11, 12))
_NODE_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE = (tag(number, BYTES) for number in (1, 2, 4, 5))
_DIM, _ITEM_TYPE, _CONSTANT_NAME, _RAW = tag(1, WHOLE), tag(2, WHOLE), tag(8, BYTES), tag(9, BYTES)
_NAME, _TYPE = tag(1, BYTES), tag(2, BYTES)  # of a graph's input or output; an attribute's name too
_FLOAT, _INT, _TEXT = tag(2, FLOAT), tag(3, WHOLE), tag(4, BYTES)  # an attribute's value
_BODY, _INTS, _VALUE_TYPE = tag(6, BYTES), tag(8, WHOLE), tag(20, WHOLE)
_TYPE_TO_SIZE = (tag(1, BYTES), tag(2, BYTES), tag(1, BYTES))  # tensor_type, shape, dim
_KEY, _VALUE = tag(1, BYTES), tag(2, BYTES)


def read_metadata(data: bytes) -> dict[str, str]:
    """The metadata of a serialised model; ContentError if the bytes are none.

    Args:
        data: The content of an ONNX file.
    """
    found = {}
    for key, begin, end in read_fields(data, 0, len(data)):
        if key == _METADATA:
            entry = {which: data[start:stop] for which, start, stop in read_fields(data, begin, end)}
            try:
                found[entry[_KEY].decode()] = entry[_VALUE].decode()
            except (KeyError, UnicodeDecodeError) as error:
                raise ContentError("an entry of its metadata is not a key and a value") from error
    return found


def check_model(data: bytes) -> None:
    """Refuse a serialised model that holds anything that blockcache does not write, with a ContentError that names it.

    Args:
        data: The content of an ONNX file.
    """
    checker = _Checker(data)
    graphs = checker.fields("model", 0, len(data), (_GRAPH, _IR_VERSION, _OPSET, _METADATA))[_GRAPH]
    if len(graphs) != 1:
        raise ContentError(f"it has {len(graphs)} graphs, expected one")
    checker.graph(*graphs[0], known=set())


def model_for(data: bytes, outputs: Collection[str]) -> bytes:
    """The part of a checked model that some outputs need, as a model of its own: ONNX Runtime would compute everything.

    Args:
        data: The content of an ONNX file that `check_model` accepted.
        outputs: Names of those outputs of its graph that are wanted.
    """
    parts, start = [], 0
    for key, begin, end in read_fields(data, 0, len(data)):
        if key == _GRAPH:
            graph = _graph_for(data, begin, end, {output.encode() for output in outputs})
            parts.append(bytes([_GRAPH]) + _encoded(len(graph)) + graph)
        elif key != _METADATA:
            parts.append(data[start:end])  # fields follow each other without a gap
        start = end
    return b"".join(parts)


def _graph_for(data: bytes, begin: int, end: int, outputs: set[bytes]) -> bytes:
    fields = read_fields(data, begin, end)
    needed, nodes = {*outputs}, set[Field]()
    for field in reversed([item for item in fields if item[0] == _NODE]):  # nodes stand behind those that they need
        if not needed.isdisjoint(_texts(data, field, _NODE_OUTPUT)):
            nodes.add(field)
            needed |= _taken(data, field)

    def wanted(field: Field) -> bool:
        if field[0] == _GRAPH_OUTPUT:
            return not outputs.isdisjoint(_texts(data, field, _NAME))
        if field[0] in (_CONSTANT, _GRAPH_INPUT):
            return not needed.isdisjoint(_texts(data, field, _CONSTANT_NAME if field[0] == _CONSTANT else _NAME))
        return field[0] != _NODE or field in nodes

    starts = [begin, *(stop for _, _, stop in fields)]
    return b"".join(data[start : field[2]] for start, field in zip(starts, fields, strict=False) if wanted(field))


def _taken(data: bytes, node: Field) -> set[bytes]:
    """What a node takes, and what the nodes of a graph inside it do."""
    found = {*_texts(data, node, _NODE_INPUT)}
    for key, *attribute in read_fields(data, *node[1:]):
        for inner, *body in read_fields(data, *attribute) if key == _ATTRIBUTE else ():
            for field in read_fields(data, *body) if inner == _BODY else ():
                found |= _taken(data, field) if field[0] == _NODE else set()
    return found


def _encoded(number: int) -> bytes:
    """A whole number as protobuf writes it: seven bits each, the lowest first."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _encoded(number >> 7)


def _texts(data: bytes, field: Field, key: int) -> list[bytes]:
    """The contents of all fields of one kind within a message."""
    return [data[start:stop] for found, start, stop in read_fields(data, *field[1:]) if found == key]


class _Checker:
    """Goes through a model once. Names are compared as bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left, self._scans, self._depth = MOST_FIELDS, 0, 0
        self._attributes: dict[tuple[bytes, bytes], tuple[str, int]] = {}  # few of them are different
        self._largest: dict[bytes, int] = {}  # by the name of a constant of whole numbers

    def fields(self, what: str, begin: int, end: int, known: Iterable[int]) -> dict[int, list[Span]]:
        """Where the contents of a message lie, for each of the fields that it may have."""
        found: dict[int, list[Span]] = {key: [] for key in known}
        for key, start, stop in self._read(begin, end):
            if key not in found:
                raise _unknown_field(what, key)
            found[key].append((start, stop))
        return found

    def _read(self, begin: int, end: int) -> list[Field]:
        fields = read_fields(self._data, begin, end, self._left)
        self._left -= len(fields)
        return fields

    def _last(self, spans: list[Span]) -> bytes:
        """The content of a field that a message has once; of several protobuf takes the last."""
        return self._data[slice(*spans[-1])] if spans else b""

    def graph(self, begin: int, end: int, known: set[bytes]) -> int:
        """Check a graph inside which `known` is defined, and return how many inputs it has."""
        found = self.fields("graph", begin, end, (_NODE, _GRAPH_NAME, _CONSTANT, _GRAPH_INPUT, _GRAPH_OUTPUT))
        for span in found[_CONSTANT]:
            _define(known, self._constant(*span))
        for span in found[_GRAPH_INPUT]:
            _define(known, self._declared(*span))
        results = [self._declared(*span) for span in found[_GRAPH_OUTPUT]]
        for span in found[_NODE]:
            self._node(*span, known)
        if missing := [name for name in results if name not in known]:
            raise ContentError(f"nothing in it gives its output {_shown(missing[0])}")
        return len(found[_GRAPH_INPUT])

    def _node(self, begin: int, end: int, known: set[bytes]) -> None:
        inputs: list[bytes] = []
        outputs: list[bytes] = []
        attributes: list[Span] = []
        data, kind = self._data, b""
        for key, start, stop in self._read(begin, end):  # not by `fields`: there are thousands of nodes
            if key == _NODE_INPUT:
                inputs.append(data[start:stop])
            elif key == _NODE_OUTPUT:
                outputs.append(data[start:stop])
            elif key == _OPERATOR:
                kind = data[start:stop]  # of several protobuf takes the last
            elif key == _ATTRIBUTE:
                attributes.append((start, stop))
            else:
                raise _unknown_field("node", key)
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

    def _check_attributes(self, kind: bytes, attributes: list[Span], outputs: int) -> None:
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
        found = self.fields("attribute", begin, end, (_NAME, _FLOAT, _INT, _TEXT, _INTS, _VALUE_TYPE))
        name = self._last(found[_NAME]).decode(errors="replace")
        number, listed = (found[_INT] or [(0, 0)])[-1][0], [value for value, _ in found[_INTS]]
        if name not in _OPERATORS[kind].attributes:
            raise ContentError(f"its {kind.decode()} has the attribute {reprlib.repr(name)}")
        if name in _COUNTS and not 0 < number < MANY:  # ONNX Runtime divides by some of them
            raise ContentError(f"its {kind.decode()} has {name} {number}")
        if name in _WINDOWS and not all(_WINDOWS[name] <= size <= _MOST_WINDOW for size in listed or [MANY]):
            raise ContentError(f"its {kind.decode()} has {name} {reprlib.repr(listed)}")
        return name, number

    def _scan(self, attributes: list[Span], inputs: int, known: set[bytes]) -> None:
        """A Scan ends with the rows of its inputs, if it has any. There are two at most, side by side: with a guard a file
        may hold full precision beside a sampler of fewer steps."""
        self._scans, self._depth = self._scans + 1, self._depth + 1
        found = [self.fields("Scan", *span, (_NAME, _INT, _BODY, _VALUE_TYPE)) for span in attributes]
        bodies = [span for one in found for span in one[_BODY]]
        rows = [number for one in found for number, _ in one[_INT]]
        if (
            self._scans > 2
            or self._depth > 1
            or len(attributes) != 2
            or len(bodies) != 1
            or not 1 <= (rows or [0])[-1] < inputs
        ):
            raise ContentError("it repeats a step in another way than blockcache writes")
        if self.graph(*bodies[0], known=known.copy()) != inputs:
            raise ContentError("its Scan and the step inside it have different numbers of inputs")
        self._depth -= 1

    def _constant(self, begin: int, end: int) -> bytes:
        """A constant must lie in the file as a whole; its name."""
        found = self.fields("constant", begin, end, (_DIM, _ITEM_TYPE, _CONSTANT_NAME, _RAW))
        name, dims = self._last(found[_CONSTANT_NAME]), [size for size, _ in found[_DIM]]
        kind = (found[_ITEM_TYPE] or [(0, 0)])[-1][0]
        start, stop = (found[_RAW] or [(0, 0)])[-1]
        if len(dims) > _MOST_AXES or stop == start or prod(dims) * _ITEM_BYTES.get(kind, -1) != stop - start:
            raise ContentError(f"its constant {_shown(name)} is not as large as its type and shape say")
        if kind == _INT64:
            self._largest[name] = max(map(abs, memoryview(self._data)[start:stop].cast("q")))
            if self._largest[name] > _MOST_ITEMS:
                raise ContentError(f"its constant {_shown(name)} holds a number beyond {_MOST_ITEMS:,}")
        return name

    def _declared(self, begin: int, end: int) -> bytes:
        """The name of an input or output, whose type is type.tensor_type.shape.dim.dim_value."""
        found = self.fields("input or output", begin, end, (_NAME, _TYPE))
        spans = found[_TYPE]
        for wanted in _TYPE_TO_SIZE:
            spans = [(start, stop) for span in spans for key, start, stop in self._read(*span) if key == wanted]
        if any(key == _DIM and size > _MOST_ITEMS for span in spans for key, size, _ in self._read(*span)):
            raise ContentError(f"one of its inputs or outputs has a size beyond {_MOST_ITEMS:,}")
        return self._last(found[_NAME])


def _unknown_field(what: str, key: int) -> ContentError:
    return ContentError(f"its {what} has field {key >> 3} of ONNX, which blockcache does not write")


def _define(known: set[bytes], name: bytes) -> None:
    if not name or name in known:
        raise ContentError(
            f"the name {_shown(name)} in it stands for two things" if name else "a value in it has no name"
        )
    known.add(name)


def _shown(name: bytes) -> str:
    return reprlib.repr(name.decode(errors="replace"))
