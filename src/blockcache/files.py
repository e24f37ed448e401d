"""Reading and writing whole files, atomically. Knows nothing of what is inside them.

A write goes to a temporary file in the same directory and takes the old file's place in one step, so a full disk, a
killed process or a read-only directory can cost the new file but never the old one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from blockcache.errors import FileError

PathLike: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")


def write_bytes(path: PathLike, data: bytes) -> None:
    """Put `data` at `path`: all of it or none of it."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        # not tempfile: its files are private, and giving them the usual rights means reading the umask by setting it
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    except ValueError as error:  # "" and "." have no name
        raise FileError(f"cannot write {str(path)!r}: that is no file's name") from error
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror or error}; nothing was changed") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise FileError(f"cannot write {target}: {error.strerror or error}; nothing was changed") from error
    except BaseException:  # Ctrl-C in the middle: leave no half file behind
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_arrays(path: PathLike, **arrays: npt.NDArray[Any]) -> None:
    """An .npz file of plain arrays by name."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())


def read_bytes(path: PathLike, what: str) -> bytes:
    """The file's content. `what` names the thing in the error, such as "schedule"."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise FileError(f"no {what} at {path}: the file does not exist") from error
    except OSError as error:
        raise FileError(f"cannot read the {what} {path}: {error.strerror or error}") from error
    if not data:
        raise FileError(f"the {what} {path} is empty; write it again")
    return data


def write_json(path: PathLike, value: Mapping[str, Any]) -> None:
    try:
        text = _pretty(value)
    except (TypeError, ValueError) as error:  # NaN, or a type that JSON does not have
        raise FileError(f"cannot write {path}: {error}; nothing was changed") from error
    write_bytes(path, (text + "\n").encode())


def read_json(path: PathLike, what: str) -> dict[str, Any]:
    """The JSON object in a file; anything else in there is refused."""
    return parse_json(read_bytes(path, what), what, path)


def parse_json(data: bytes, what: str, path: PathLike) -> dict[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        raise FileError(f"the {what} {path} is not valid JSON ({error}); it may be cut short") from error
    if not isinstance(value, dict):
        raise FileError(f"the {what} {path} holds a JSON {type(value).__name__}, expected an object")
    return value


def expect_format(header: Mapping[str, Any], name: str, version: int, what: str, path: PathLike) -> None:
    """Refuse a file of another kind, or of a version that this code does not know."""
    if header.get("format") != name:
        raise FileError(f"{path} is not a {what}: its format is {header.get('format')!r}, expected {name!r}")
    found = header.get("version")
    if type(found) is not int or found != version:
        raise FileError(
            f"the {what} {path} has format version {found!r}, this blockcache reads version {version}; "
            "use the blockcache that wrote it or make the file again"
        )


def read_exactly(kind: type[T], value: Any) -> T:
    """A dataclass from a JSON object that has its fields and no others; ValueError otherwise."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(value, Mapping) or set(value) != names:
        odd = sorted(names ^ set(value)) if isinstance(value, Mapping) else [repr(value)]
        raise ValueError(f"missing or unknown in {kind.__name__}: {', '.join(odd)}")
    return kind(**value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _pretty(value: Mapping[str, Any]) -> str:
    """Indented JSON, but lists of numbers on one line: schedules are read by people."""
    return _render(value, "")


def _render(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        rows = [f"{inner}{json.dumps(str(key))}: {_render(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        rows = [inner + _render(item, inner) for item in value]
        return "[\n" + ",\n".join(rows) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
