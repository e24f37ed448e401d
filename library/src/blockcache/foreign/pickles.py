"""Pickles of other projects, read without running anything that stands in them.

A pickle is a program for a small stack machine, and Python's machine imports and calls whatever the program names. The one
here has nothing to call: it builds plain values and containers; where Python would import a name there is a `Global`, and
where it would call one, a `Call` that keeps the arguments. Both are inert; a reader that knows what they stand for looks
inside. Bytes stay bytes, pickled ones too. Knows nothing of torch, of OmegaConf or of what a pickle is for.

Why not `pickle.Unpickler` with a `find_class` that returns inert classes? It cannot be made as safe:
- Its dicts and sets hash every key. A tuple nested 300,000 times as a key overflows the C stack and kills the process, and
  integers that are multiples of 2**61 - 1 all collide, which takes hours. To refuse them beforehand one has to follow the
  stack, the marks and the memo, that is, to write this machine. Here a key is kept only if it is a plain value (`put`).
- BUILD sets attributes by name, on inert classes too; EXT takes objects from copyreg's cache without asking `find_class`;
  PUT allocates a memo as long as its index. Each needs a guard of its own, and a new protocol may need more, while here an
  operation that is not listed is refused.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

from blockcache.errors import ContentError, FileError, in_one_line, shortened
from blockcache.files import PathLike

MOST_BYTES = 64 * 2**20
MOST_OPERATIONS = 1_000_000
"""A checkpoint of eight layers and its optimiser takes about 50,000."""

_HARMFUL_MODULES = frozenset({
    "os", "posix", "nt", "io", "_io", "subprocess", "commands", "popen2", "pty", "sys", "importlib", "imp", "runpy",
    "code", "pickle", "_pickle", "marshal", "ctypes", "shutil", "tempfile", "socket", "urllib", "http", "ftplib",
    "smtplib", "telnetlib", "webbrowser", "asyncio", "multiprocessing", "threading", "signal", "pdb", "profile",
    "cProfile", "timeit", "trace", "pip", "distutils", "setuptools",
})  # fmt: skip
_HARMFUL_BUILTINS = frozenset({
    "eval", "exec", "compile", "open", "__import__", "input", "breakpoint", "execfile", "help", "exit", "quit",
})  # fmt: skip


@dataclass(frozen=True)
class Global:
    """A name that the pickle asks for. It was not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def harmful(self) -> bool:
        """Whether it runs code or opens files where a pickle is really run, so that no data needs it.

        This is no protection, since nothing is imported anyway: it lets the message tell an attack from an unknown class.
        """
        package = self.module.partition(".")[0]
        if package in ("builtins", "__builtin__"):
            return self.name.partition(".")[0] in _HARMFUL_BUILTINS
        return package in _HARMFUL_MODULES


@dataclass(frozen=True, eq=False)
class Persistent:
    """Something that is kept outside of the pickle, by the name that the pickle gives it."""

    name: Any


@dataclass(eq=False, repr=False, slots=True)
class Call:
    """A call that Python would have made, and what would have been put into its result.

    function   a Global, as a rule
    arguments  those of the call
    state      what the result's __setstate__ or __dict__ would have been given, or None
    items      what was put under keys; only under plain ones, the others are left out
    members    what was appended
    """

    function: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    members: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The class that the result would be of, or the function that would have made it."""
        function = self.function
        if isinstance(function, Global) and function.name in ("_reconstructor", "__newobj__") and self.arguments:
            function = self.arguments[0]
        return str(function) if isinstance(function, Global) else type(function).__name__


def kind_of(value: Any) -> str:
    """What a value out of a pickle is, for messages: the class that a call would have made, or the plain type."""
    return value.kind if isinstance(value, Call) else type(value).__name__


def as_mapping(value: Any) -> dict[Any, Any] | None:
    """What is under which key, where the pickle describes a dict or an ordered one; else None.

    Args:
        value: Anything that `load_pickle` gave.
    """
    if isinstance(value, Call) and value.kind in ("collections.OrderedDict", "collections.defaultdict"):
        return value.items
    return value if isinstance(value, dict) else None


def load_pickle(data: bytes, what: str, path: PathLike) -> Any:
    """What a pickle describes, in plain values, `Global`, `Call` and `Persistent`; a FileError where it describes nothing.

    Args:
        data: The pickle.
        what: The thing in messages, such as "checkpoint".
        path: The file that it is from.
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


_CONSTANTS = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "FLOAT", "BINFLOAT",
})  # fmt: skip


class _Machine:
    """One run over one pickle: a stack, marks on it, and a memo. Nothing here imports, calls or opens anything."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what lies under each mark
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):  # reads, and runs nothing
            if count == MOST_OPERATIONS:
                raise ContentError(f"more than {MOST_OPERATIONS:,} operations")
            if opcode.name == "STOP":
                return self.stack.pop()
            self.step(opcode.name, argument)
        raise ContentError("it has no end")

    def step(self, name: str, argument: Any) -> None:
        """One operation, by the name that pickletools gives it; one that is not listed is refused."""
        push, pop = self.stack.append, self.stack.pop  # of the stack as it is before a mark is taken
        match name:
            case _ if name in _CONSTANTS:
                push(argument)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[int(argument)] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                push(self.memo[int(argument)])
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "PROTO" | "FRAME":
                pass
            case "NONE":
                push(None)
            case "NEWTRUE" | "NEWFALSE":
                push(name == "NEWTRUE")
            case "DUP":
                push(self.stack[-1])
            case "MARK":
                self.below.append(self.stack)
                self.stack = []
            case "POP" if self.stack:
                pop()
            case "POP" | "POP_MARK":
                self.marked()
            case "EMPTY_LIST":
                push([])
            case "EMPTY_TUPLE":
                push(())
            case "EMPTY_DICT":
                push({})
            case "EMPTY_SET":  # of a set, as of what a call makes, the members are kept beside it and never hashed
                push(Call(Global("builtins", "set")))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                if len(self.stack) < count:
                    raise ContentError("it takes more values than there are")
                self.stack[-count:] = [tuple(self.stack[-count:])]
            case "LIST" | "TUPLE" | "DICT" | "FROZENSET":
                self.collect(name, self.marked())
            case "APPEND":
                self.extend([pop()])
            case "APPENDS" | "ADDITEMS":
                self.extend(self.marked())
            case "SETITEM":
                value, key = pop(), pop()
                self.put([key, value])
            case "SETITEMS":
                self.put(self.marked())
            case "GLOBAL":
                push(_named(*str(argument).split(" ", 1)))
            case "STACK_GLOBAL":
                attribute, module = pop(), pop()
                push(_named(module, attribute))
            case "REDUCE" | "NEWOBJ":
                arguments, function = pop(), pop()
                if not isinstance(arguments, tuple):
                    raise ContentError(f"a call with {type(arguments).__name__} for its arguments")
                push(Call(function, arguments))
            case "NEWOBJ_EX":
                keywords = pop()
                self.step("NEWOBJ", None)
                if isinstance(keywords, dict):
                    self.stack[-1].items.update(keywords)
            case "OBJ":
                function, *members = self.marked()
                self.stack.append(Call(function, tuple(members)))
            case "INST":
                members = self.marked()
                self.stack.append(Call(_named(*str(argument).split(" ", 1)), tuple(members)))
            case "BUILD":
                state = pop()
                if not isinstance(self.stack[-1], Call):
                    raise ContentError(f"a state for {type(self.stack[-1]).__name__}, which has none")
                self.stack[-1].state = state
            case "PERSID":
                push(Persistent(argument))
            case "BINPERSID":
                push(Persistent(pop()))
            case _:
                raise ContentError(f"the operation {name}, which no checkpoint needs")

    def marked(self) -> list[Any]:
        """What lies above the last mark, which goes."""
        found, self.stack = self.stack, self.below.pop()
        return found

    def collect(self, name: str, values: list[Any]) -> None:
        if name == "DICT":
            self.stack.append({})
            self.put(values)
        elif name == "FROZENSET":
            self.stack.append(Call(Global("builtins", "frozenset"), members=values))
        else:
            self.stack.append(tuple(values) if name == "TUPLE" else values)

    def extend(self, values: list[Any]) -> None:
        """Append to what is on top of the stack."""
        holder = self.stack[-1]
        members = holder.members if isinstance(holder, Call) else holder
        if not isinstance(members, list):
            raise ContentError(f"something is appended to {type(holder).__name__}")
        members.extend(values)

    def put(self, pairs: list[Any]) -> None:
        """Put under keys of what is on top of the stack: under plain keys only, see the head of this module."""
        holder = self.stack[-1]
        items = holder.items if isinstance(holder, Call) else holder
        if not isinstance(items, dict):
            raise ContentError(f"something is put under a key of {type(holder).__name__}")
        if len(pairs) % 2:
            raise ContentError("a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(key, str | float | bytes | None) or (isinstance(key, int) and -(2**63) <= key < 2**63):
                items[key] = value


def _named(module: Any, name: Any = "") -> Global:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ContentError("a name that is no text")
    found = Global(module, name)
    if found.harmful:
        raise _HarmError(found)
    return found
