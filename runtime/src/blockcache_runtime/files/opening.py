"""Files as they are read: never blocking, never more than was meant, never with a raw error. Knows no format.

What a file says of its own size is compared with the file before anything of that size is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn, TypeAlias, TypeVar

from blockcache_runtime.errors import BlockcacheError, ContentError, FileError, short, shortened

PathLike: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")

JSON_BYTES = 32 * 2**20
"""Of a JSON file or header. Ours have less than one megabyte."""


@contextlib.contextmanager
def opened(path: PathLike, what: str) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file to be read, and its size; anything else is refused, and a pipe is not waited for."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened: to open a device can mean something
            raise _not_a_file(path, what)
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise _not_a_file(path, what)
            if not found.st_size:
                raise FileError(f"the {what} {path} is empty; write it again")
            yield file, found.st_size
    except FileNotFoundError as error:
        raise FileError(f"no {what} at {path}: the file does not exist") from error
    except OSError as error:
        raise FileError(f"cannot read the {what} {path}: {error.strerror or error}") from error
    except (TypeError, ValueError) as error:  # a path with a zero in it, or none at all
        raise FileError(f"cannot read the {what} {short(path)}: that is no file's name ({error})") from error


def read_bytes(path: PathLike, what: str, most: int | None = None) -> bytes:
    """The file's content. `what` names the thing in the error, such as "schedule"; larger than `most` it is refused."""
    with opened(path, what) as (file, size):
        if most is not None and size > most:
            raise FileError(f"the {what} {path} has {size:,} bytes, expected {most:,} at most; is it another file?")
        return file.read(size)


@contextlib.contextmanager
def reading(what: str, path: PathLike, again: str = "make it again") -> Iterator[None]:
    """Errors of a value that is made from a file name the file; raw ones say that it is garbled, and what to do."""
    try:
        yield
    except FileError:
        raise  # names a path already
    except (ContentError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise FileError(f"the {what} {path} is garbled ({shortened(str(reason), 400)}); {again}") from error
    except BlockcacheError as error:
        raise type(error)(f"{path}: {error}") from error


def parse_json(data: bytes, what: str, path: PathLike) -> dict[str, Any]:
    """A JSON object, each key once. What is in it, finite numbers above all, is up to its `Fields`."""
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        reason = shortened(str(error), 200)
        raise FileError(f"the {what} {path} is not valid JSON ({reason}); it may be cut short") from error
    if not isinstance(value, dict):
        raise FileError(f"the {what} {path} holds a JSON {type(value).__name__}, expected an object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {short(twice)} appears twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _not_a_file(path: PathLike, what: str) -> FileError:
    kind = "a directory" if os.path.isdir(path) else "not a regular file"
    return FileError(f"cannot read the {what} {path}: it is {kind}")
