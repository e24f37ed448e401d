"""The part of an export that one of its outputs needs, as a model of its own: nodes, constants and inputs, and nothing else.

Made from the bytes of a file that was checked. Knows nothing of ONNX Runtime and of what is computed.
"""

from __future__ import annotations

from blockcache_runtime.graph import CONSTANT, DECLARED_NAME, GIVEN, GRAPH, METADATA, NODE, RESULT, TENSOR_NAME, wires
from blockcache_runtime.protobuf import BYTES, Field, read_fields


def part_for(data: bytes, output: str) -> bytes:
    """A serialised model that gives this output alone."""
    model = bytearray()
    for field in read_fields(data, 0, len(data)):
        key, begin, end = field
        if key == GRAPH:
            model += _written(key, _graph_for(data, begin, end, output.encode()))
        elif key != METADATA:
            model += _copied(data, field)
    return bytes(model)


def _graph_for(data: bytes, begin: int, end: int, output: bytes) -> bytes:
    fields = read_fields(data, begin, end)
    needed, kept = {output}, set[Field]()
    for field in reversed([item for item in fields if item[0] == NODE]):
        taken, given = wires(data, *field[1:])
        if not needed.isdisjoint(given):  # nodes stand behind those that they need
            kept.add(field)
            needed.update(taken)
    for field in fields:
        key, start, stop = field
        if key in (CONSTANT, GIVEN):
            wanted = _name(data, start, stop, key) in needed
        elif key == RESULT:
            wanted = _name(data, start, stop, key) == output
        else:
            wanted = key != NODE
        if wanted:
            kept.add(field)
    return b"".join(_copied(data, field) for field in fields if field in kept)


def _name(data: bytes, begin: int, end: int, kind: int) -> bytes:
    """Of a constant, or of what goes in or out."""
    wanted = TENSOR_NAME if kind == CONSTANT else DECLARED_NAME
    return next(data[start:stop] for key, start, stop in read_fields(data, begin, end) if key == wanted)


def _copied(data: bytes, field: Field) -> bytes:
    key, begin, end = field
    return _written(key, data[begin:end]) if key & 7 == BYTES else _number(key) + _number(begin)


def _written(key: int, content: bytes) -> bytes:
    return _number(key) + _number(len(content)) + content


def _number(value: int) -> bytes:
    """Seven bits each, the lowest first."""
    found: list[int] = []
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
