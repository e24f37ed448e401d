"""Small sums in text, such as `2-1+0` or `20 if True else 0`, worked out without running any code.

The text is taken apart into a tree, and only what is written down here is done with it. Knows nothing of configs.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from blockcache.errors import ContentError, short

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
