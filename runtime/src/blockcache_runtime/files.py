"""Files as they are read: never blocking, never more than was meant, never with a raw error; and formats with a header.

Knows no format's content. A file's size is compared with a limit before anything of that size is made.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from blockcache_runtime._version import __version__
from blockcache_runtime.atomic import PathLike
from blockcache_runtime.errors import BlockcacheError, ContentError, FileError, short, shortened
from blockcache_runtime.fields import Fields, Kind, Name, read

JSON_BYTES = 32 * 2**20  # of a JSON file or header; those that blockcache writes have less than one megabyte


@contextlib.contextmanager
def opened(path: PathLike, what: str) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file to be read, and its size; anything else is refused, and a pipe is not waited for.

    Args:
        path: The file.
        what: What it is called in errors, such as "schedule".
    """
    try:
        _check_regular(os.stat(path), path, what)  # before it is opened: to open a device can mean something
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            _check_regular(found, path, what)
            if not found.st_size:
                raise FileError(f"the {what} {path} is empty; write it again")
            yield file, found.st_size
    except FileNotFoundError as error:
        raise FileError(f"no {what} at {path}: the file does not exist") from error
    except OSError as error:
        raise FileError(f"cannot read the {what} {path}: {error.strerror or error}") from error
    except (TypeError, ValueError) as error:  # a path with a zero in it, or none at all
        raise FileError(f"cannot read the {what} {short(path)}: that is no file's name ({error})") from error


def _check_regular(found: os.stat_result, path: PathLike, what: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise FileError(f"cannot read the {what} {path}: it is {kind}")


def read_bytes(path: PathLike, what: str, most: int | None = None) -> bytes:
    """The file's content.

    Args:
        path: The file.
        what: What it is called in errors, such as "schedule".
        most: The largest size in bytes that is accepted; None for any.
    """
    with opened(path, what) as (file, size):
        if most is not None and size > most:
            raise FileError(f"the {what} {path} has {size:,} bytes, expected {most:,} at most; is it another file?")
        return file.read(size)


@contextlib.contextmanager
def reading(what: str, path: PathLike, again: str = "make it again") -> Iterator[None]:
    """Turns errors about a value that is read from a file into a FileError that names the file and says what to do.

    Args:
        what: What the file is called in errors, such as "schedule".
        path: The file that the value is made from.
        again: The advice at the end of the sentence: how to come by a good file.
    """
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
    """A JSON object, each key once. What is in it, finite numbers above all, is up to its `Fields`.

    Args:
        data: The text of the JSON object, in UTF-8.
        what: What the file is called in errors, such as "schedule".
        path: Where the text came from, for errors alone.
    """
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        reason = shortened(str(error), 200)
        raise FileError(f"the {what} {path} is not valid JSON ({reason}); it may be cut short") from error
    if not isinstance(value, dict):
        raise FileError(f"the {what} {path} holds a JSON {type(value).__name__}, expected an object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value:
            raise ValueError(f"key {short(name)} appears twice")
        value[name] = item
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


@dataclass(frozen=True)
class Format:
    """One kind of file: a header (format, version, made_by) and a content, which is read in one strict way."""

    name: str  # what the header says under `format`, such as "blockcache.schedule"
    what: str  # the thing in messages, such as "schedule"
    keys: Mapping[str, Kind]  # the content's keys and what is under each; `Any` is bounded JSON of any shape
    optional: tuple[str, ...] = ()  # what a file may lack: `made_by` if older ones do, `format` if one made by hand may
    others: bool = False  # whether there may be other keys, which the value that is made of the content checks
    version: int = 1  # any other one is refused
    again: str = "make it again"  # what to do about a file that is garbled
    entry: str = "blockcache"  # the name of the header among the metadata of a file of another kind

    @functools.cached_property
    def fields(self) -> Fields:
        """The content and `made_by`."""
        kinds = {**self.keys, "made_by": Name}
        optional = {key: kind for key, kind in kinds.items() if key in self.optional}
        return Fields({key: kind for key, kind in kinds.items() if key not in optional}, optional, self.others)

    @property
    def header(self) -> dict[str, Any]:
        """What stands in front of the content."""
        return {"format": self.name, "version": self.version, "made_by": f"blockcache {__version__}"}

    def whole(self, content: Mapping[str, Any], path: PathLike) -> dict[str, Any]:
        """Header and content of the file at `path`. Nothing is written that could not be read again: no NaN, no number of
        numpy's."""
        try:
            read(self.fields, {**content, "made_by": self.header["made_by"]})
        except (BlockcacheError, TypeError, ValueError) as error:
            raise FileError(f"cannot write {path}: {error}; nothing was changed") from error
        return {**self.header, **content}

    def text(self, content: Mapping[str, Any], path: PathLike) -> str:
        """Header and content as one line, for the metadata of the file at `path`."""
        return json.dumps(self.whole(content, path), allow_nan=False)

    def parse(self, text: str, path: PathLike) -> dict[str, Any]:
        """The content of a header that stands among the metadata of the file at `path`."""
        if len(text) > JSON_BYTES:
            raise FileError(f"the {self.what}'s header {path} has {len(text):,} characters; {self.again}")
        return self.content(parse_json(text.encode(errors="replace"), f"{self.what}'s header", path), path)

    def content(self, value: Mapping[str, Any], path: PathLike) -> dict[str, Any]:
        """The content of what the file at `path` holds; one of another kind or version, or with other keys, is refused."""
        if "format" not in self.optional or {"format", "version"} & set(value):
            self._check_header(value, path)
        with self.reading(path):
            content: dict[str, Any] = read(
                self.fields, {k: v for k, v in value.items() if k not in ("format", "version")}
            )
        content.pop("made_by", None)
        return content

    def reading(self, path: PathLike) -> contextlib.AbstractContextManager[None]:
        """For making a value of the content: whatever is wrong with it is said of this file."""
        return reading(self.what, path, self.again)

    def _check_header(self, value: Mapping[str, Any], path: PathLike) -> None:
        kind, version = value.get("format"), value.get("version")
        if kind != self.name:
            article = "an" if self.what[0] in "aeioAEIO" else "a"
            raise FileError(f"{path} is not {article} {self.what}: its format is {short(kind)}, expected {self.name!r}")
        if type(version) is not int or version != self.version:
            raise FileError(
                f"the {self.what} {path} has format version {short(version)}, this blockcache reads version "
                f"{self.version}; use the blockcache that wrote it or make the file again"
            )
