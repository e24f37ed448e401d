"""Pickles of other projects, read without running anything that stands in them.

A pickle is a program for a small stack machine, and Python's own machine imports and calls whatever the program names. This
one has nothing to call: it builds plain values and containers; where Python would import a name there is a `Global`, and
where it would call one, a `Made` that keeps what it would have been called with. Both are inert, and who knows what they
stand for looks inside. Bytes stay bytes, pickled ones too. Knows nothing of torch, of OmegaConf or of what a pickle is for.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from blockcache.errors import ContentError, FileError, in_one_line, shortened
from blockcache.files import PathLike
from blockcache.foreign.inert import Global, Made, Persistent

MOST_BYTES = 64 * 2**20
MOST_OPERATIONS = 1_000_000
"""A checkpoint of eight layers and its optimiser takes about 50,000."""


def load_pickle(data: bytes, what: str, path: PathLike) -> Any:
    """What a pickle describes, in plain values, `Global`, `Made` and `Persistent`; a FileError where it describes nothing.

    data  the pickle
    what  the thing in messages, such as "checkpoint"
    path  the file that it is from
    """
    if len(data) > MOST_BYTES:
        raise FileError(f"the {what} {path} holds a pickle of {len(data):,} bytes, expected {MOST_BYTES:,} at most")
    try:
        return _Machine().run(data)
    except _HarmError as error:
        raise FileError(
            f"the {what} {path} would run {shortened(str(error), 100)} if it were loaded as a pickle, which is no part of a "
            f"{what}; nothing of it was run, do not load it by other means"
        ) from None
    except (ContentError, LookupError, TypeError, ValueError, OverflowError, MemoryError) as error:
        reason = error if isinstance(error, ContentError) else in_one_line(error)
        raise FileError(
            f"the {what} {path} is garbled ({shortened(str(reason), 300)}); it may be cut short, get it again"
        ) from error


class _HarmError(Exception):
    """A name that no data needs."""


class _Machine:
    """One run over one pickle: a stack, marks on it, and a memo. Nothing here imports, calls or opens anything."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # what lies under each mark
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):  # reads, and runs nothing
            if count == MOST_OPERATIONS:
                raise ContentError(f"more than {MOST_OPERATIONS:,} operations")
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(argument)
            else:
                step = _STEPS.get(name)
                if step is None:
                    raise ContentError(f"the operation {name}, which no checkpoint needs")
                step(self, argument)
        raise ContentError("it has no end")

    # -- values

    def _marked(self) -> list[Any]:
        """What lies above the last mark, which goes."""
        found, self._stack = self._stack, self._below.pop()
        return found

    def mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._stack = self._below.pop()

    def pop_mark(self, _: Any) -> None:
        self._marked()

    def duplicate(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def get(self, index: Any) -> None:
        self._stack.append(self._memo[int(index)])

    def put(self, index: Any) -> None:
        self._memo[int(index)] = self._stack[-1]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def listed(self, _: Any) -> None:
        found = self._marked()  # first: it is another stack afterwards
        self._stack.append(found)

    def tupled(self, _: Any) -> None:
        found = tuple(self._marked())
        self._stack.append(found)

    def last(self, count: int) -> None:
        if len(self._stack) < count:
            raise ContentError("it takes more values than there are")
        found = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(found)

    def mapped(self, _: Any) -> None:
        pairs = self._marked()
        made: dict[Any, Any] = {}
        _put_all(made, pairs)
        self._stack.append(made)

    def collected(self, kind: str) -> None:
        """A set: its members need not be plain values, and only those may be hashed."""
        made = Made(Global("builtins", kind), ())
        if kind == "frozenset":
            made.members = self._marked()
        self._stack.append(made)

    def append(self, _: Any) -> None:
        value = self._stack.pop()
        _members(self._stack[-1]).append(value)

    def extend(self, _: Any) -> None:
        values = self._marked()
        _members(self._stack[-1]).extend(values)

    def set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _put_all(_items(self._stack[-1]), [key, value])

    def set_items(self, _: Any) -> None:
        pairs = self._marked()
        _put_all(_items(self._stack[-1]), pairs)

    # -- what Python would import, call or look up

    def named(self, argument: Any) -> None:
        module, _, name = str(argument).partition(" ")
        self._stack.append(_checked(Global(module, name)))

    def stack_named(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ContentError("a name that is no text")
        self._stack.append(_checked(Global(module, name)))

    def call(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple):
            raise ContentError(f"a call with {type(arguments).__name__} for its arguments")
        self._stack.append(Made(function, arguments))

    def call_named(self, _: Any) -> None:
        named = self._stack.pop()
        self.call(None)
        if isinstance(named, dict):
            self._stack[-1].items.update(named)

    def object(self, _: Any) -> None:
        function, *arguments = self._marked()
        self._stack.append(Made(function, tuple(arguments)))

    def instance(self, argument: Any) -> None:
        arguments = tuple(self._marked())
        self.named(argument)
        self._stack.append(Made(self._stack.pop(), arguments))

    def build(self, _: Any) -> None:
        state = self._stack.pop()
        made = self._stack[-1]
        if not isinstance(made, Made):
            raise ContentError(f"a state for {type(made).__name__}, which has none")
        made.state = state

    def persistent(self, argument: Any) -> None:
        self._stack.append(Persistent(argument))

    def stack_persistent(self, _: Any) -> None:
        self._stack.append(Persistent(self._stack.pop()))


def _checked(name: Global) -> Global:
    if name.harmful:
        raise _HarmError(name)
    return name


def _members(value: Any) -> list[Any]:
    if isinstance(value, Made):
        return value.members
    if not isinstance(value, list):
        raise ContentError(f"something is appended to {type(value).__name__}")
    return value


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, Made):
        return value.items
    if not isinstance(value, dict):
        raise ContentError(f"something is put under a key of {type(value).__name__}")
    return value


def _put_all(holder: dict[Any, Any], pairs: list[Any]) -> None:
    """Under plain keys only: to hash a tuple of tuples of tuples can take the whole stack of the process."""
    if len(pairs) % 2:
        raise ContentError("a key without a value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if isinstance(key, str | int | float | bytes | None):
            holder[key] = value


_CONSTANTS = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "FLOAT", "BINFLOAT",
})  # fmt: skip
Step = Callable[[_Machine, Any], None]
_STEPS: dict[str, Step] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine._stack.append(None),
    "NEWTRUE": lambda machine, _: machine._stack.append(True),
    "NEWFALSE": lambda machine, _: machine._stack.append(False),
    "EMPTY_LIST": lambda machine, _: machine._stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine._stack.append(()),
    "EMPTY_DICT": lambda machine, _: machine._stack.append({}),
    "EMPTY_SET": lambda machine, _: machine.collected("set"),
    "FROZENSET": lambda machine, _: machine.collected("frozenset"),
    "TUPLE1": lambda machine, _: machine.last(1),
    "TUPLE2": lambda machine, _: machine.last(2),
    "TUPLE3": lambda machine, _: machine.last(3),
    "LIST": _Machine.listed,
    "TUPLE": _Machine.tupled,
    "DICT": _Machine.mapped,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.extend,
    "ADDITEMS": _Machine.extend,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate,
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": _Machine.stack_named,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": _Machine.call_named,
    "OBJ": _Machine.object,
    "INST": _Machine.instance,
    "BUILD": _Machine.build,
    "PERSID": _Machine.persistent,
    "BINPERSID": _Machine.stack_persistent,
}
