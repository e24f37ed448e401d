"""What a pickle of another project describes beyond plain values, as inert objects. Knows nothing of reading pickles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MODULES = frozenset({
    "os", "posix", "nt", "io", "_io", "subprocess", "commands", "popen2", "pty", "sys", "importlib", "imp", "runpy",
    "code", "pickle", "_pickle", "marshal", "ctypes", "shutil", "tempfile", "socket", "urllib", "http", "ftplib",
    "smtplib", "telnetlib", "webbrowser", "asyncio", "multiprocessing", "threading", "signal", "pdb", "profile",
    "cProfile", "timeit", "trace", "pip", "distutils", "setuptools",
})  # fmt: skip
_BUILTINS = frozenset({
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

        Nothing is safer for this, since no name is imported: it tells who means harm from who brings a class of his own.
        """
        inner = self.module.partition(".")[0]
        if inner in ("builtins", "__builtin__"):
            return self.name.partition(".")[0] in _BUILTINS
        return inner in _MODULES


@dataclass(frozen=True, eq=False)
class Persistent:
    """Something that is kept outside of the pickle, by what the pickle calls it."""

    name: Any


class Made:
    """What Python would have made by a call: of what, with which arguments, and what was put into it afterwards.

    function   a Global, as a rule
    arguments  those of the call
    state      what its __setstate__ or its __dict__ would have been given, or None
    items      what was put under keys; only under plain ones, the others are left out
    members    what was appended
    """

    __slots__ = ("arguments", "function", "items", "members", "state")

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.state: Any = None
        self.items: dict[Any, Any] = {}
        self.members: list[Any] = []

    @property
    def kind(self) -> str:
        """The class that it would be of, or the function that would have made it."""
        function = self.function
        if isinstance(function, Global) and function.name in ("_reconstructor", "__newobj__") and self.arguments:
            function = self.arguments[0]
        return str(function) if isinstance(function, Global) else type(function).__name__


def as_mapping(value: Any) -> dict[Any, Any] | None:
    """What is under which key, where the pickle describes a dict or an ordered one; else None."""
    if isinstance(value, Made) and value.kind in ("collections.OrderedDict", "collections.defaultdict"):
        return value.items
    return value if isinstance(value, dict) else None
