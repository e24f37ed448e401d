"""Files: formats with a strict reader, what values must look like, atomic writes. Knows no format's content.

JSON files may be gzipped: `NAME.json` may lie there as `NAME.json.gz`. What a robot needs too is in `blockcache_runtime`;
everything is to be had from here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Annotated, Any, BinaryIO, ClassVar, TypeVar, get_type_hints

from blockcache_runtime import files
from blockcache_runtime.arrays import parse_arrays, write_arrays
from blockcache_runtime.atomic import (
    PathLike,
    check_writable,
    make_directory,
    no_writer,
    only_writer,
    write_bytes,
    writing,
)
from blockcache_runtime.errors import FileError, in_one_line
from blockcache_runtime.fields import NEWER, Count, Fields, Kind, Limit, Name, Positive, Steps, expect_keys, read
from blockcache_runtime.files import JSON_BYTES, opened, parse_json, read_bytes, reading

T = TypeVar("T")
F = TypeVar("F", bound="JsonFile")

JSON, PACKED = ".json", ".json.gz"


def list_of(kind: Kind) -> Kind:
    """`list[kind]`, where the kind is a `Fields`.

    Args:
        kind: The fields of each object in the list.
    """
    return list[kind]


def dict_of(kind: Kind) -> Kind:
    """`dict[str, kind]`, where the kind is a `Fields`.

    Args:
        kind: The fields of the object under each key.
    """
    return dict[str, kind]


@cache
def keys_of(value: Any) -> Mapping[str, Kind]:
    """The fields of a dataclass as keys, each with what its annotation says is under it.

    Args:
        value: The dataclass; a class, not an instance.
    """
    hints = get_type_hints(value, include_extras=True)
    return {item.name: hints[item.name] for item in fields(value)}


class Format(files.Format):
    """One kind of file, which the runtime's `Format` describes, as it is saved and loaded."""

    def save(self, path: PathLike, content: Mapping[str, Any]) -> None:
        """Write header and content as a JSON file for people to read, atomically; gzipped if its name ends in ".json.gz"."""
        data = (_render(self.whole(content, path), "") + "\n").encode()
        write_bytes(path, gzip.compress(data, mtime=0) if str(path).endswith(PACKED) else data)

    def load(self, path: PathLike) -> dict[str, Any]:
        """The content of a JSON file, gzipped or not; one of another kind or version, or with other keys, is refused."""
        return self.content(read_json(path, self.what), path)

    def save_tensors(
        self, path: PathLike, content: Mapping[str, Any], tensors: Mapping[str, T], save: Callable[..., bytes]
    ) -> None:
        """Write a safetensors file, atomically. `save` is that of the library whose tensors they are."""
        write_bytes(path, save(dict(tensors), metadata={self.entry: self.text(content, path)}))

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
        """The value of what stands in a file, which was compared with the format.

        Args:
            content: By key; this may change it.
        """
        return cls(**content)

    def save(self, path: PathLike) -> None:
        """Write the JSON file, atomically.

        Args:
            path: The file.
        """
        self.FORMAT.save(path, self.content())

    @classmethod
    def load(cls: type[F], path: PathLike) -> F:
        """Read a file that `save` wrote, gzipped or not; another version, unknown keys and odd values are refused.

        Args:
            path: The file.
        """
        content = cls.FORMAT.load(path)
        with cls.FORMAT.reading(path):
            return cls.of_content(content)


def digest(value: Any) -> str:
    """One name for a JSON value, the same in every process, whatever the order of its keys.

    Args:
        value: In JSON types.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


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


def read_json(path: PathLike, what: str) -> dict[str, Any]:
    """The JSON object in a file; larger than 32 MB, as it is or unpacked, it is refused.

    Args:
        path: The file, gzipped if its name ends in ".json.gz". Where there is no NAME.json, NAME.json.gz is read.
        what: Names the thing in the error, such as "schedule".
    """
    place = f"{path}.gz" if packed_exists(path) and not os.path.exists(path) else path
    data = read_bytes(place, what, JSON_BYTES)
    return parse_json(_unpacked(data, what, place) if str(place).endswith(PACKED) else data, what, place)


def packed_exists(path: PathLike) -> bool:
    """Whether a JSON file lies there in its gzipped form."""
    return str(path).endswith(JSON) and os.path.exists(f"{path}.gz")


def _unpacked(data: bytes, what: str, path: PathLike) -> bytes:
    """Never more than the limit is made of the data, whatever it says of its size."""
    unpacking = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # with gzip's header
    try:
        found = unpacking.decompress(data, JSON_BYTES + 1)
    except zlib.error as error:
        raise FileError(
            f"the {what} {path} cannot be unpacked ({error}); it is damaged, make or copy it again"
        ) from error
    if len(found) > JSON_BYTES:
        raise FileError(f"the {what} {path} unpacks to more than {JSON_BYTES:,} bytes; is it another file?")
    if not unpacking.eof or unpacking.unused_data:
        raise FileError(f"the {what} {path} is cut short or has something behind its end; make or copy it again")
    return found


def exists(path: PathLike) -> bool:
    """Whether there is anything, NAME.json.gz in place of NAME.json too; a name that cannot be one is none.

    Args:
        path: The file or directory.
    """
    try:
        return os.path.exists(path) or packed_exists(path)
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class TensorInfo:
    """What the header of a safetensors file says of one tensor."""

    dtype: str
    shape: Annotated[tuple[Count, ...], Limit(0, 16)]
    data_offsets: tuple[Count, ...]


def read_tensors(
    path: PathLike,
    what: str,
    again: str,
    load: Callable[[bytes], dict[str, T]],
    check: Callable[[Mapping[str, TensorInfo]], None] | None = None,
) -> tuple[dict[str, str], dict[str, T]]:
    """The metadata and the tensors of a safetensors file.

    Args:
        path: The file.
        what: It is called in errors.
        again: What to do about one that is garbled.
        load: That of the library whose tensors are wanted.
        check: Looks at names and shapes before the tensors are read, and raises if they are not those that are wanted.
    """
    with opened(path, what) as (file, size):
        metadata, header = _read_header(file, size, path, what, again)
        with reading(what, path, again):
            infos = read(dict[str, TensorInfo], header)
            if check is not None:
                check(infos)
        file.seek(0)
        data = file.read(size)
    try:
        return metadata, load(data)
    except Exception as error:  # types of numbers that the library lacks are a KeyError, or worse
        raise FileError(
            f"the {what} {path} cannot be read ({in_one_line(error)}); it may be cut short, {again}"
        ) from error


def read_metadata(path: PathLike, what: str) -> dict[str, str]:
    """The metadata of a safetensors file; none of its tensors is read.

    Args:
        path: The file.
        what: It is called in errors.
    """
    with opened(path, what) as (file, size):
        return _read_header(file, size, path, what, "make it again")[0]


def _read_header(
    file: BinaryIO, size: int, path: PathLike, what: str, again: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata, and what is said of the tensors."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, JSON_BYTES):
        raise FileError(f"the {what} {path} cannot be read (no safetensors header); it may be cut short, {again}")
    header = parse_json(file.read(length), f"header of the {what}", path)
    with reading(what, path, again):
        metadata: dict[str, str] = read(dict[str, str] | None, header.pop("__metadata__", None), "__metadata__") or {}
    return metadata, header
