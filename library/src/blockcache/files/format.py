"""A `Format` that is a file of its own: JSON for people to read, or the header of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Any, ClassVar, TypeVar, get_type_hints

import blockcache_runtime.files
from blockcache._version import __version__
from blockcache.files.arrays import TensorInfo, read_tensors
from blockcache.files.atomic import write_bytes
from blockcache.files.json_files import read_json
from blockcache_runtime.errors import BlockcacheError, FileError
from blockcache_runtime.fields import Kind, read
from blockcache_runtime.files import PathLike

T = TypeVar("T")
F = TypeVar("F", bound="JsonFile")


def list_of(kind: Kind) -> Kind:
    """`list[kind]`, where the kind is a `Fields`."""
    return list[kind]


def dict_of(kind: Kind) -> Kind:
    """`dict[str, kind]`, where the kind is a `Fields`."""
    return dict[str, kind]


@cache
def keys_of(value: Any) -> Mapping[str, Kind]:
    """The fields of a dataclass as keys, each with what its annotation says is under it."""
    hints = get_type_hints(value, include_extras=True)
    return {item.name: hints[item.name] for item in fields(value)}


def header_of(of: blockcache_runtime.files.Format) -> dict[str, Any]:
    """What stands in front of the content of such a file."""
    return {"format": of.name, "version": of.version, "made_by": f"blockcache {__version__}"}


def header_text(of: blockcache_runtime.files.Format, content: Mapping[str, Any], path: PathLike) -> str:
    """Header and content as one line, for the metadata of the file at `path`."""
    return json.dumps(_whole(of, content, path), allow_nan=False)


def _whole(of: blockcache_runtime.files.Format, content: Mapping[str, Any], path: PathLike) -> dict[str, Any]:
    """Header and content. Nothing is written that could not be read again: no NaN, no number of numpy's."""
    header = header_of(of)
    try:
        read(of.fields, {**content, "made_by": header["made_by"]})
    except (BlockcacheError, TypeError, ValueError) as error:
        raise FileError(f"cannot write {path}: {error}; nothing was changed") from error
    return {**header, **content}


class Format(blockcache_runtime.files.Format):
    """One kind of file, which the runtime's `Format` describes, as it is saved and loaded."""

    @property
    def header(self) -> dict[str, Any]:
        """What stands in front of the content."""
        return header_of(self)

    def save(self, path: PathLike, content: Mapping[str, Any]) -> None:
        """Write header and content as a JSON file for people to read, atomically."""
        write_bytes(path, (_render(_whole(self, content, path), "") + "\n").encode())

    def load(self, path: PathLike) -> dict[str, Any]:
        """The content of a JSON file, gzipped or not; one of another kind or version, or with other keys, is refused."""
        return self.content(read_json(path, self.what), path)

    def save_tensors(
        self, path: PathLike, content: Mapping[str, Any], tensors: Mapping[str, T], save: Callable[..., bytes]
    ) -> None:
        """Write a safetensors file, atomically. `save` is that of the library whose tensors they are."""
        write_bytes(path, save(dict(tensors), metadata={self.entry: header_text(self, content, path)}))

    def load_tensors(
        self,
        path: PathLike,
        load: Callable[[bytes], dict[str, T]],
        check: Callable[[Mapping[str, TensorInfo]], None] | None = None,
    ) -> tuple[dict[str, Any], dict[str, T]]:
        """The content and the tensors of a safetensors file; `check` sees names and shapes before tensors are made."""
        metadata, tensors = read_tensors(path, self.what, self.again, load, check)
        return self.parse(metadata.get(self.entry, "{}"), path), tensors


class JsonFile:
    """A frozen dataclass that is a JSON file of its own; its `FORMAT` has the keys of its fields, see `keys_of`."""

    FORMAT: ClassVar[Format]

    def content(self) -> dict[str, Any]:
        """What stands in the file."""
        content: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # every one is a dataclass
        return content

    @classmethod
    def of_content(cls: type[F], content: dict[str, Any]) -> F:
        """The value of what stands in a file, which was compared with the format."""
        return cls(**content)

    def save(self, path: PathLike) -> None:
        """Write the JSON file, atomically."""
        self.FORMAT.save(path, self.content())

    @classmethod
    def load(cls: type[F], path: PathLike) -> F:
        """Read a file that `save` wrote, gzipped or not; another version, unknown keys and odd values are refused."""
        content = cls.FORMAT.load(path)
        with cls.FORMAT.reading(path):
            return cls.of_content(content)


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
