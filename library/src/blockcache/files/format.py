"""A `Format` that is a file of its own: JSON for people to read, or the header of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from blockcache.files.arrays import TensorInfo, read_tensors
from blockcache.files.atomic import write_bytes
from blockcache.files.json_files import read_json
from blockcache_runtime.files import format as runtime_format
from blockcache_runtime.files.opening import PathLike

T = TypeVar("T")


class Format(runtime_format.Format):
    """One kind of file, which the runtime's `Format` describes, as it is saved and loaded."""

    def save(self, path: PathLike, content: Mapping[str, Any]) -> None:
        """Write header and content as a JSON file for people to read, atomically."""
        self.check_content(content, path)
        write_bytes(path, (_render({**self.header, **content}, "") + "\n").encode())

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
