"""Reading protobuf's wire format where it lies: fields of a message, without a copy. Knows nothing of what they mean.

Written by hand because a robot has neither `onnx` nor `protobuf`, and ONNX Runtime gives no way to look into a file before
it is made ready to run.
"""

from __future__ import annotations

from typing import TypeAlias

from blockcache_runtime.errors import ContentError

Field: TypeAlias = tuple[int, int, int]
"""(tag, begin, end): the content is data[begin:end], or `begin` itself where it is a whole number that stops at `end`."""
MOST_FIELDS = 4 * 10**6  # of a file, so that none takes long or much room to look at; exports have a hundredth of it
WHOLE, BYTES, FLOAT = 0, 2, 5  # wire types; exports have no others
_NUMBERED = {WHOLE, BYTES}  # begin with a number


def tag(number: int, wire: int) -> int:
    """How a field of this number and wire type begins; one of another wire type is another field.

    Args:
        number: The number that the message's definition gives the field.
        wire: `WHOLE`, `BYTES` or `FLOAT`.
    """
    return number << 3 | wire


def read_fields(data: bytes, begin: int, end: int, most: int = MOST_FIELDS) -> list[Field]:
    """The fields of the message data[begin:end] in their order; ContentError if these are no whole fields, or too many.

    Args:
        data: The bytes that the message lies in.
        begin: Its first byte.
        end: The byte behind its last.
        most: How many fields it may have.
    """
    fields: list[Field] = []
    at = begin
    try:
        for _ in range(most):
            if at >= end:
                break
            key = data[at]
            at += 1
            if key > 127:
                key, at = _rest_of_number(data, at, key)
            wire = key & 7
            if wire == FLOAT:
                size = 4
            elif wire in _NUMBERED:
                size = data[at]
                at += 1
                if size > 127:
                    size, at = _rest_of_number(data, at, size)
            else:
                raise ContentError(f"it has a field of wire type {wire} at byte {at - 1}")
            if wire == WHOLE:
                fields.append((key, size, at))
            else:
                fields.append((key, at, at + size))
                at += size
    except IndexError:
        at = end + 1
    if at < end:
        raise ContentError(f"it has more than {MOST_FIELDS} fields")
    if at > end:
        raise ContentError("a field in it ends behind what it is part of")
    return fields


def _rest_of_number(data: bytes, at: int, number: int) -> tuple[int, int]:
    """A number of several bytes whose first was read: seven bits each, the lowest first; and where it ends."""
    number &= 127
    for shift in range(7, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise ContentError("a number in it has more than ten bytes")
