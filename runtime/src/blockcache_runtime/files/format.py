"""One kind of file as a value: its header, what its content looks like, one strict way to read it, one to write it.

Knows no format's content.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockcache_runtime._version import __version__
from blockcache_runtime.errors import BlockcacheError, FileError, short
from blockcache_runtime.files.fields import Fields, Kind, Name, read
from blockcache_runtime.files.opening import JSON_BYTES, PathLike, parse_json, reading

_HEADER = ("format", "version", "made_by")


@dataclass(frozen=True)
class Format:
    """One kind of file: a header (format, version, made_by) and a content, written and read in one strict way.

    name      what the header says under `format`, such as "blockcache.schedule"
    what      the thing in messages, such as "schedule"
    keys      the content's keys and what is under each, a kind of `fields`: `str`, `list[Block]`, and so on; `Any` or a key
              that is not named, which `others` allows, is bounded JSON of any shape
    optional  keys that a file may lack: `made_by` if older files do, `format` if one that was made by hand may
    others    whether there may be other keys, which the value that is made of the content checks
    version   any other one is refused
    again     what to do about a file that is garbled
    entry     the name of the header among the metadata of a safetensors file
    """

    name: str
    what: str
    keys: Mapping[str, Kind]
    optional: tuple[str, ...] = ()
    others: bool = False
    version: int = 1
    again: str = "make it again"
    entry: str = "blockcache"

    @property
    def header(self) -> dict[str, Any]:
        return {"format": self.name, "version": self.version, "made_by": f"blockcache {__version__}"}

    def text(self, content: Mapping[str, Any], path: PathLike) -> str:
        """Header and content as one line, for the metadata of the file at `path`."""
        self.check_content(content, path)
        return json.dumps({**self.header, **content}, allow_nan=False)

    def parse(self, text: str, path: PathLike) -> dict[str, Any]:
        """The content of what `text` made, as strictly as `load` does it."""
        if len(text) > JSON_BYTES:
            raise FileError(f"the {self.what}'s header {path} has {len(text):,} characters; {self.again}")
        return self.content(parse_json(text.encode(errors="replace"), f"{self.what}'s header", path), path)

    def reading(self, path: PathLike) -> contextlib.AbstractContextManager[None]:
        """For making a value of the content: whatever is wrong with it is said of this file."""
        return reading(self.what, path, self.again)

    def content(self, value: Mapping[str, Any], path: PathLike) -> dict[str, Any]:
        if "format" not in self.optional or {"format", "version"} & set(value):
            self._check_header(value, path)
        with self.reading(path):
            content: dict[str, Any] = read(self._fields, {k: v for k, v in value.items() if k not in _HEADER[:2]})
        content.pop("made_by", None)
        return content

    def check_content(self, content: Mapping[str, Any], path: PathLike) -> None:
        """Nothing is written that could not be read again: no NaN, no number of numpy's, no type that JSON lacks."""
        try:
            read(self._fields, {**content, "made_by": self.header["made_by"]})
        except (BlockcacheError, TypeError, ValueError) as error:
            raise FileError(f"cannot write {path}: {error}; nothing was changed") from error

    @functools.cached_property
    def _fields(self) -> Fields:
        kinds = {**self.keys, "made_by": Name}
        optional = {key: kind for key, kind in kinds.items() if key in self.optional}
        return Fields({key: kind for key, kind in kinds.items() if key not in optional}, optional, self.others)

    def _check_header(self, value: Mapping[str, Any], path: PathLike) -> None:
        kind, version = value.get("format"), value.get("version")
        if kind != self.name:
            article = "an" if self.what[0] in "aeioAEIO" else "a"
            found = f"its format is {short(kind)}, expected {self.name!r}"
            raise FileError(f"{path} is not {article} {self.what}: {found}")
        if type(version) is not int or version != self.version:
            raise FileError(
                f"the {self.what} {path} has format version {short(version)}, this blockcache reads version "
                f"{self.version}; use the blockcache that wrote it or make the file again"
            )
