"""Files of arrays: safetensors, .npz and .npy. No pickle is read, and nothing is made larger than the file that it is in."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from blockcache.files.atomic import write_bytes
from blockcache_runtime.errors import FileError, in_one_line
from blockcache_runtime.fields import Count, Limit, read
from blockcache_runtime.files import JSON_BYTES, PathLike, opened, parse_json, reading

T = TypeVar("T")

_UNPACKED, _RATIO = 256 * 2**20, 100  # an .npz may hold more than the first only if it is no more than so much packed


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

    again  what to do about one that is garbled
    load   that of the library whose tensors are wanted
    check  looks at names and shapes before the tensors are read, and raises if they are not those that are wanted
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


def read_metadata(path: PathLike, what: str, again: str = "make it again") -> dict[str, str]:
    """The metadata of a safetensors file; none of its tensors is read.

    Args:
        path: The file.
        what: It is called in errors.
        again: What to do about one that is garbled.
    """
    with opened(path, what) as (file, size):
        return _read_header(file, size, path, what, again)[0]


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


def parse_arrays(data: bytes, what: str, path: PathLike) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file by name, or that of an .npy file under "obs". None of Python's objects, no pickle."""
    try:
        if not data.startswith(b"PK"):
            return {"obs": _array(data)}
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if total > max(_UNPACKED, _RATIO * len(data)):
                raise ValueError(f"{total:,} bytes are packed into {len(data):,}")
            arrays = {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}
        if len(arrays) < len(members):
            raise ValueError("a name appears twice")
        return arrays
    except Exception as error:  # zipfile and numpy raise a dozen kinds about bytes that are not theirs
        reason = in_one_line(error)
        raise FileError(f"cannot read the {what} {path} ({reason}); expected an .npz file of plain arrays") from error


def write_arrays(path: PathLike, **arrays: npt.NDArray[Any]) -> None:
    """An .npz file of plain arrays by name."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())


def _array(data: bytes) -> npt.NDArray[Any]:
    """One array, once its header agrees with the bytes that are there."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(file)
    left = len(data) - file.tell()
    if dtype.hasobject or math.prod(map(int, shape)) * dtype.itemsize != left:
        raise ValueError(f"an array of {dtype} and shape {shape} does not lie in {left:,} bytes")
    file.seek(0)
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
