"""The config of a run as OmegaConf pickles it: plain values out of inert calls, with interpolations resolved.

`${a.b}`, `${.b}` and `${eval:'${a}+1'}` are known; of a sum such as `20 if True else 0` the text is taken apart into a tree,
and only what is written down here is done with it. A value that depends on another resolver (`${now:...}`), or that is no
plain value, is refused when it is asked for, and not before. Knows nothing of policies.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from blockcache.errors import ContentError, short
from blockcache.foreign.pickles import Call, as_mapping, kind_of

DEPTH, VALUES, TEXT = 40, 100_000, 10_000
"""Levels within levels, values in all, and characters of one text: far beyond any config, and quickly looked through."""
_RESOLVER = re.compile(r"([A-Za-z_][\w.]*)\s*:(.*)", re.DOTALL)
_REQUIRED = object()
LONGEST, LARGEST = 200, 10**12
Value: TypeAlias = "int | float | str | bool | None"

_SUMS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Unknown:
    """A value that only the program that wrote the file could make."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class Config:
    """A tree of plain values, by paths such as "policy.model.n_head"; interpolations are worked out when asked for."""

    def __init__(self, value: Any) -> None:
        self._left = VALUES
        tree = self._plain(value, 0)
        if not isinstance(tree, dict):
            raise ContentError(f"expected a config with names, got {_kind(tree)}")
        self._tree: dict[str, Any] = tree

    def get(self, path: str, default: Any = _REQUIRED) -> Any:
        """The value at a path, with all interpolations in it resolved.

        Args:
            path: Names, with dots between them.
            default: The answer where the config has no such path; without it that is a ContentError.
        """
        self._left = VALUES
        try:
            way = path.split(".")
            return self._resolved(self._find(way, 0), way, 0)
        except LookupError:
            if default is _REQUIRED:
                raise ContentError(f"the config lacks {path}") from None
            return default
        except ContentError as error:
            raise ContentError(f"{path} in the config: {error}") from None

    # -- out of inert objects

    def _plain(self, value: Any, depth: int) -> Any:
        self._count(depth)
        if isinstance(value, Call):
            value = _content(value)
        if isinstance(value, Mapping):
            return {key: self._plain(item, depth + 1) for key, item in value.items() if isinstance(key, str)}
        if isinstance(value, list | tuple):
            return [self._plain(item, depth + 1) for item in value]
        if isinstance(value, Call):  # a node within a node
            return self._plain(value, depth + 1)
        if isinstance(value, int) and abs(value) > LARGEST:
            return Unknown("number far too large")
        return value if isinstance(value, bool | int | float | str | None) else Unknown(_kind(value))

    def _count(self, depth: int) -> None:
        self._left -= 1
        if depth > DEPTH or self._left < 0:
            raise ContentError(f"a config of more than {VALUES:,} values, or of more than {DEPTH} levels")

    # -- interpolations

    def _find(self, path: list[str], depth: int) -> Any:
        """What stands at a path, as it stands there; a LookupError where nothing does."""
        found: Any = self._tree
        for place, name in enumerate(path):
            if isinstance(found, str) and "${" in found:  # a whole branch that is a reference
                found = self._text(found, path[:place], depth + 1)
            if isinstance(found, list) and name.isdecimal() and len(name) < 10:
                found = found[int(name)]
            elif isinstance(found, dict):
                found = found[name]
            else:
                raise KeyError(name)
        return found

    def _resolved(self, value: Any, path: list[str], depth: int) -> Any:
        self._count(depth)
        if isinstance(value, Unknown):
            raise ContentError(f"it is a {value.kind}, expected a plain value")
        if isinstance(value, str):
            return self._text(value, path, depth)
        if isinstance(value, dict):
            return {key: self._resolved(item, [*path, key], depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolved(item, [*path, str(place)], depth + 1) for place, item in enumerate(value)]
        return value

    def _text(self, text: str, path: list[str], depth: int) -> Any:
        """A text in which every ${...} is replaced; one that is nothing else has the type of what it stands for."""
        self._count(depth)
        start = text.find("${")
        if start < 0:
            return text
        stop = _closing(text, start)
        found = self._reference(text[start + 2 : stop - 1], path, depth + 1)
        if start == 0 and stop == len(text):
            return found
        rest = self._text(text[stop:], path, depth + 1)
        joined = f"{text[:start]}{_written(found)}{_written(rest)}"
        if len(joined) > TEXT:
            raise ContentError(f"a text of more than {TEXT:,} characters")
        return joined

    def _reference(self, inner: str, path: list[str], depth: int) -> Any:
        if named := _RESOLVER.fullmatch(inner):
            name, argument = named.groups()
            if name != "eval":
                raise ContentError(f"it depends on ${{{name}:...}}, which only the program knows that wrote it")
            argument = argument.strip()
            if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\"":
                argument = argument[1:-1]
            return calculate(_written(self._text(argument, path, depth)))
        wanted = _written(self._text(inner, path, depth)).strip()
        dots = len(wanted) - len(wanted.lstrip("."))
        above = path[: len(path) - dots] if dots else []
        way = [*above, *re.findall(r"[^.\[\]]+", wanted)]
        try:
            return self._resolved(self._find(way, depth), way, depth)
        except LookupError:
            raise ContentError(f"it refers to {short(wanted)}, which the config lacks") from None


def _content(call: Call) -> Any:
    """What an OmegaConf object holds; other objects stay what they are."""
    state = call.state[0] if isinstance(call.state, tuple) and call.state else call.state
    if call.kind.startswith("omegaconf.") and isinstance(state, dict):
        for name in ("_content", "_val"):
            if name in state:
                return state[name]
    found = as_mapping(call)
    return Unknown(call.kind) if found is None else found


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Unknown) else kind_of(value)


def _closing(text: str, start: int) -> int:
    """One behind the brace that closes the one at `start`."""
    open_braces = 0
    for found in re.finditer(r"\$\{|\}", text[start:]):
        open_braces += 1 if found[0] == "${" else -1
        if open_braces == 0:
            return start + found.end()
    raise ContentError(f"{short(text)} has a brace that is not closed")


def _written(value: Any) -> str:
    if isinstance(value, dict | list):
        raise ContentError("a whole branch of the config within a text")
    return str(value)


def calculate(text: str) -> Value:
    """The value of a sum, a comparison or a choice between such; a ContentError for anything else."""
    if len(text) > LONGEST:
        raise ContentError(f"a sum of {len(text):,} characters, expected {LONGEST} at most")
    try:
        found: Value = _value(ast.parse(text.strip(), mode="eval").body)
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise ContentError(f"{short(text)} cannot be worked out ({type(error).__name__})") from error
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _bounded(-_number(inner))
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _number(inner)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _value(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
            return _bounded(_SUMS[type(op)](_number(left), _number(right)))
        case ast.BoolOp(op=op, values=[first, *others]):
            found = _value(first)
            for other in others:
                if bool(found) is isinstance(op, ast.Or):
                    return found
                found = _value(other)
            return found
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return _COMPARISONS[type(op)](_value(left), _value(right))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test) else orelse)
    raise ContentError(f"{type(node).__name__} is no part of a sum")


def _number(node: ast.expr) -> Any:
    value = _value(node)
    if not isinstance(value, int | float):
        raise ContentError(f"{short(value)} is no number")
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise ContentError(f"{short(value)} is beyond {LARGEST:,}")
    return value
