"""What a value out of a file must look like: said by a type, checked in one place. Knows no file and no format.

A kind is a type as in an annotation: `bool`, `int`, `float`, `str`, `X | None`, `list[X]`, `tuple[X, ...]`, `tuple[X, X]`,
`dict[str, X]`, a dataclass (an object with its fields, `NEWER` ones if they are there, and no others), a class with
`from_dict`, `Fields`, or `Any`: whatever JSON can hold.
`Annotated[X, Limit(low, high)]` bounds a number or a length; `Annotated[X, Fields(...)]` is an object with these fields.
Strict: neither true nor "3" is a number, and numbers are finite.

Not msgspec or pydantic, which do the same: an export is opened with numpy and onnxruntime alone, the errors are sentences,
and both accept a key that stands there twice.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from blockcache_runtime.errors import ContentError, short, shortened

NEWER = "newer"
"""In a dataclass field's metadata: files of before there was such a field lack it, and its default stands for it."""
Kind: TypeAlias = Any  # a type as above; Python has no name for that
Reader: TypeAlias = Callable[[Any], Any]

DEPTH, ITEMS, TEXT, WHOLE = 20, 1_000_000, 100_000, 2**64 - 1
"""Where nothing else is said: lists within lists, values in one, characters in a text, and the largest whole number."""


@dataclass(frozen=True)
class Limit:
    """For `Annotated`: the least and the largest number, or length of a text, a list or an object."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        least = "" if self.low == -math.inf else f"{self.low:,} or more"
        most = "" if self.high == math.inf else f"{self.high:,} at most"
        return " and ".join(filter(None, (least, most)))


Count: TypeAlias = Annotated[int, Limit(0)]
Positive: TypeAlias = Annotated[float, Limit(0)]
Steps: TypeAlias = Annotated[int, Limit(1, 10_000)]  # of denoising
Name: TypeAlias = Annotated[str, Limit(1, 200)]
Names: TypeAlias = Annotated[tuple[Name, ...], Limit(1, 10_000)]  # of a policy's blocks


@dataclass(frozen=True, eq=False)
class Fields:
    """An object that stays one: what is under each key, and under those that it may lack; `others` may hold anything."""

    required: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=dict)
    others: bool = False


class _MisfitError(ContentError):
    """A value that does not fit; lists and objects around it add its place, from the inside out."""

    def __init__(self, before: str, behind: str) -> None:
        super().__init__(before + behind)
        self.before, self.behind, self.place = before, behind, ""


def read(kind: Kind, value: Any, where: str = "") -> Any:
    """`value` as `kind` says it, its lists and objects made new; otherwise a ContentError.

    Args:
        kind: See above.
        value: What JSON gave, or will be given.
        where: What the value is called in the error; without it the error names the place within the value alone.
    """
    try:
        return _reader(kind)(value)
    except _MisfitError as misfit:
        place = where + misfit.place if where else misfit.place.lstrip(".")
        under = f" under {shortened(place, 100)!r}" if place else ""
        raise ContentError(f"{misfit.before}{under}{misfit.behind}") from None


def expect_keys(found: Collection[str], required: Collection[str], optional: Collection[str] = ()) -> None:
    """Refuse keys that are missing or that nobody knows, by name; the reader of the file says of which file.

    Args:
        found: The keys that are there.
        required: Those that must be there.
        optional: Those that may be there as well.
    """
    if odd := sorted(map(str, (set(required) - set(found)) | (set(found) - {*required, *optional}))):
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        names = ", ".join(shortened(name, 60) for name in odd[:5])
        raise _MisfitError("missing or unknown keys", f": {names}{more}")


@cache
def _reader(kind: Kind) -> Reader:
    """The function that checks a kind, made once: files hold the same few kinds many thousand times."""
    origin: Any = get_origin(kind)
    inner = get_args(kind)
    if origin is Annotated:
        return _reader(inner[1]) if isinstance(inner[1], Fields) else _limited(_reader(inner[0]), inner[1])
    if origin in (Union, types.UnionType):
        (some,) = [_reader(item) for item in inner if item is not type(None)]
        return lambda value: None if value is None else some(value)
    if kind in (Any, object):
        return _anything
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    shape = origin or kind
    if isinstance(shape, type) and issubclass(shape, list | tuple):
        listed = _listed(_reader(inner[0] if inner else Any), shape)
        fixed = shape is tuple and inner and inner[-1] is not Ellipsis
        return _limited(listed, Limit(len(inner), len(inner))) if fixed else listed
    if shape in (dict, Mapping):
        item = _reader(inner[1] if inner else Any)
        return lambda value: _pairs(_mapping(value), item)
    if isinstance(kind, Fields):
        return _object(kind, dict)
    if hasattr(kind, "from_dict"):
        return lambda value: kind.from_dict(value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        newer = {item.name: hints[item.name] for item in fields(kind) if item.metadata.get(NEWER)}
        older = {item.name: hints[item.name] for item in fields(kind) if item.name not in newer}
        return _object(Fields(older, newer), kind)
    raise TypeError(f"no way to read a {kind!r}")


def _need(words: str, value: Any) -> _MisfitError:
    return _MisfitError(f"it needs {words}", f", got {short(value)}")


def _bool(value: Any) -> Any:
    if type(value) is not bool:
        raise _need("true or false", value)
    return value


def _int(value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _need("a whole number", value)
    if abs(value) > WHOLE:
        raise _need("a whole number of 64 bits", value)
    return int(value)


def _float(value: Any) -> Any:
    if isinstance(value, int):
        return _int(value)  # as it stands there, so that it is written again as it was
    if not isinstance(value, float):
        raise _need("a number", value)
    if not math.isfinite(value):
        raise _need("a finite number", value)
    return float(value)


def _str(value: Any) -> Any:
    if not isinstance(value, str):
        raise _need("a text", value)
    if len(value) > TEXT:
        raise _need(f"a text of {TEXT:,} characters at most", value)
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON has it, no file or terminal takes it
        raise _need("a text in Unicode", value) from None
    return str(value)


_SIMPLE: dict[Any, Reader] = {bool: _bool, int: _int, float: _float, str: _str}


def _anything(value: Any, depth: int = 0) -> Any:
    """JSON of any shape. Its numbers, texts and lengths are bounded too, and so is its depth."""
    if value is None:
        return value
    for simple, reader in _SIMPLE.items():
        if isinstance(value, simple):
            return reader(value)
    if depth == DEPTH:
        raise _MisfitError("there are lists within lists", f", more than {DEPTH} of them")
    if isinstance(value, Mapping):
        return _pairs(value, lambda item: _anything(item, depth + 1))
    if isinstance(value, list | tuple):
        return _each(value, lambda item: _anything(item, depth + 1))
    raise _need("something that JSON can hold", value)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _need("an object", value)
    return value


def _limited(inner: Reader, limit: Limit) -> Reader:
    def check(value: Any) -> Any:
        made = inner(value)
        size = made if isinstance(made, int | float) else len(made)
        if not limit.low <= size <= limit.high:
            raise _need(f"{'' if size is made else 'a length of '}{limit}", value)
        return made

    return check


def _listed(inner: Reader, shape: Callable[[list[Any]], Any]) -> Reader:
    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _need("a list", value)
        found = _each(value, inner)
        return found if shape is list else shape(found)

    return check


def _object(kind: Fields, make: Callable[..., Any]) -> Reader:
    known = {name: _reader(inner) for name, inner in {**kind.required, **kind.optional}.items()}

    def check(value: Any) -> Any:
        keys = set(_mapping(value))
        expect_keys(keys & set(known) if kind.others else keys, kind.required, kind.optional)
        return make(**{_str(key): _inside(known.get(key, _anything), item, key) for key, item in value.items()})

    return check


def _each(value: Sequence[Any], inner: Reader) -> list[Any]:
    if len(value) > ITEMS:
        raise _need(f"a list of {ITEMS:,} values at most", value)
    made: list[Any] = []
    try:
        for item in value:  # not by `_inside`: lists are long
            made.append(inner(item))
    except _MisfitError as misfit:
        misfit.place = f"[{len(made)}]{misfit.place}"
        raise
    return made


def _pairs(value: Mapping[Any, Any], inner: Reader) -> dict[str, Any]:
    if len(value) > ITEMS:
        raise _need(f"an object of {ITEMS:,} keys at most", value)
    return {_str(key): _inside(inner, item, key) for key, item in value.items()}


def _inside(inner: Reader, item: Any, key: Any) -> Any:
    try:
        return inner(item)
    except _MisfitError as misfit:
        misfit.place = f".{key}{misfit.place}"
        raise
