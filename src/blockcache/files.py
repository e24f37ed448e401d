"""Files of ours: formats with a strict reader, atomic writes, and places checked before the work. Knows no format's content.

A write goes to a temporary file in the same directory and takes the old file's place in one step, so a full disk, a
killed process or a read-only directory can cost the new file but never the old one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import reprlib
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from blockcache._version import __version__
from blockcache.errors import BlockcacheError, ContentError, FileError

PathLike: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")

_HEADER = ("format", "version", "made_by")
_IN_WORDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


@dataclass(frozen=True)
class Format:
    """One kind of file: a header (format, version, made_by) and a content, written and read in one strict way.

    name      what the header says under `format`, such as "blockcache.schedule"
    what      the thing in messages, such as "schedule"
    keys      the content's keys and what is under each: dict, list, str, int, or object where the value that is made of
              it checks that itself; None if it checks the keys too
    optional  keys that a file may lack: `made_by` if older files do, `format` if one that was made by hand may
    version   any other one is refused
    again     what to do about a file that is garbled
    entry     the name of the header among the metadata of a safetensors file
    """

    name: str
    what: str
    keys: Mapping[str, type] | None
    optional: tuple[str, ...] = ()
    version: int = 1
    again: str = "make it again"
    entry: str = "blockcache"

    @property
    def header(self) -> dict[str, Any]:
        return {"format": self.name, "version": self.version, "made_by": f"blockcache {__version__}"}

    def save(self, path: PathLike, content: Mapping[str, Any]) -> None:
        """Write header and content as a JSON file for people to read, atomically."""
        with _no_json(path):
            text = _render({**self.header, **content}, "")
        write_bytes(path, (text + "\n").encode())

    def load(self, path: PathLike) -> dict[str, Any]:
        """The content of a JSON file; one of another kind or version, or with other keys, is refused."""
        return self._content(_parse(read_bytes(path, self.what), self.what, path), path)

    def text(self, content: Mapping[str, Any], path: PathLike) -> str:
        """Header and content as one line, for the metadata of the file at `path`."""
        with _no_json(path):
            return json.dumps({**self.header, **content}, allow_nan=False)

    def parse(self, text: str, path: PathLike) -> dict[str, Any]:
        """The content of what `text` made, as strictly as `load` does it."""
        return self._content(_parse(text.encode(), f"{self.what}'s header", path), path)

    def save_tensors(
        self, path: PathLike, content: Mapping[str, Any], tensors: Mapping[str, T], save: Callable[..., bytes]
    ) -> None:
        """Write a safetensors file, atomically. `save` is that of the library whose tensors they are."""
        write_bytes(path, save(dict(tensors), metadata={self.entry: self.text(content, path)}))

    def load_tensors(
        self, path: PathLike, load: Callable[[bytes], dict[str, T]]
    ) -> tuple[dict[str, Any], dict[str, T]]:
        """The content and the tensors of a safetensors file."""
        from safetensors import SafetensorError  # here, as a robot that reads headers only need not have it

        data = read_bytes(path, self.what)
        try:
            tensors = load(data)
            length = int.from_bytes(data[:8], "little")
            metadata: Mapping[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
        except (SafetensorError, ValueError, KeyError) as error:
            raise FileError(
                f"the {self.what} {path} cannot be read ({error}); it may be cut short, {self.again}"
            ) from error
        return self.parse(metadata.get(self.entry, "{}"), path), tensors

    def reading(self, path: PathLike) -> contextlib.AbstractContextManager[None]:
        """For making a value of the content: whatever is wrong with it is said of this file."""
        return reading(self.what, path, self.again)

    def _content(self, value: Mapping[str, Any], path: PathLike) -> dict[str, Any]:
        if "format" not in self.optional or {"format", "version"} & set(value):
            self._check_header(value, path)
        if self.keys is not None:
            kinds = {**self.keys, "made_by": str}
            with self.reading(path):
                expect_keys(set(value) - {"format", "version"}, set(kinds) - set(self.optional), self.optional)
                for key, kind in kinds.items():
                    item = value.get(key)
                    if key in value and (not isinstance(item, kind) or (kind is int and isinstance(item, bool))):
                        raise ContentError(f"it needs {_IN_WORDS[kind]} under {key!r}, got {reprlib.repr(item)}")
        return {key: item for key, item in value.items() if key not in _HEADER}

    def _check_header(self, value: Mapping[str, Any], path: PathLike) -> None:
        kind, version = value.get("format"), value.get("version")
        if kind != self.name:
            article = "an" if self.what[0] in "aeioAEIO" else "a"
            found = f"its format is {reprlib.repr(kind)}, expected {self.name!r}"
            raise FileError(f"{path} is not {article} {self.what}: {found}")
        if type(version) is not int or version != self.version:
            raise FileError(
                f"the {self.what} {path} has format version {reprlib.repr(version)}, this blockcache reads version "
                f"{self.version}; use the blockcache that wrote it or make the file again"
            )


@contextlib.contextmanager
def reading(what: str, path: PathLike, again: str = "make it again") -> Iterator[None]:
    """Errors of a value that is made from a file name the file; raw ones say that it is garbled, and what to do."""
    try:
        yield
    except FileError:
        raise  # names a path already
    except (ContentError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise FileError(f"the {what} {path} is garbled ({reason}); {again}") from error
    except BlockcacheError as error:
        raise type(error)(f"{path}: {error}") from error


def expect_keys(
    found: Collection[str], required: Collection[str], optional: Collection[str] = (), where: str = "keys"
) -> None:
    """Refuse keys that are missing or that nobody knows, by name; the reader of the file says of which file."""
    if odd := (set(required) - set(found)) | (set(found) - {*required, *optional}):
        raise ContentError(f"missing or unknown {where}: {', '.join(sorted(odd))}")


def read_exactly(kind: type[T], value: Any) -> T:
    """A dataclass from a JSON object that has its fields and no others."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ContentError(f"a {kind.__name__} is an object, got {reprlib.repr(value)}")
    expect_keys(value, names, where=f"in {kind.__name__}")
    return kind(**value)


def check_writable(path: PathLike, *, directory: bool = False) -> None:
    """Refuse a place that cannot be written, before any work is done for it.

    path       the output file; the directory that it shall be in must exist
    directory  the output is a directory: it may be missing, and its parent too, but no more than that
    """
    with _writing(path):
        target = Path(path)
        if directory:
            above = (target, target.parent, target.parent.parent)
            target = next((place for place in above if place.exists()), above[-1]) / "probe"
        temporary, handle = _temporary(target, path)
        os.close(handle)
        os.unlink(temporary)


def make_directory(path: PathLike) -> None:
    """Make a directory that somebody named as an output, and its parent if need be; `check_writable` allows the same."""
    with _writing(path):
        for place in (Path(path).parent, Path(path)):
            place.mkdir(exist_ok=True)


def write_bytes(path: PathLike, data: bytes) -> None:
    """Put `data` at `path`: all of it or none of it. The directory must exist."""
    with _writing(path):
        temporary, handle = _temporary(Path(path), path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:  # Ctrl-C in the middle, too: leave no half file behind
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


def _temporary(target: Path, named: PathLike) -> tuple[Path, int]:
    """A new file beside the target, open to be written; `named` is what errors call the output."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    if not target.parent.exists():
        raise FileError(f"cannot write {named}: the directory {target.parent} does not exist; make it first")
    if target.exists() and not target.is_file():  # a device would be replaced by a file
        raise OSError(errno.EINVAL, "it is not a regular file")
    # not tempfile: its files are private, and giving them the usual rights means reading the umask by setting it
    return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)


@contextlib.contextmanager
def _writing(path: PathLike) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # "" and "." have no name
        raise FileError(f"cannot write {str(path)!r}: that is no file's name") from error
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error


@contextlib.contextmanager
def _no_json(path: PathLike) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:  # NaN, or a type that JSON does not have
        raise FileError(f"cannot write {path}: {error}; nothing was changed") from error


def _parse(data: bytes, what: str, path: PathLike) -> dict[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        raise FileError(f"the {what} {path} is not valid JSON ({error}); it may be cut short") from error
    if not isinstance(value, dict):
        raise FileError(f"the {what} {path} holds a JSON {type(value).__name__}, expected an object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _render(value: Any, indent: str) -> str:
    """Indented JSON, but lists of numbers on one line: schedules are read by people."""
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        rows = [f"{inner}{json.dumps(str(key))}: {_render(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        rows = [inner + _render(item, inner) for item in value]
        return "[\n" + ",\n".join(rows) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
