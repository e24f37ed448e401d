"""Files as they are read: never blocking, never more than was meant, never with a raw error. Knows no format.

What a file says of its own size is compared with the file before anything of that size is made.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from blockcache_runtime.errors import BlockcacheError, ContentError, FileError, in_one_line, short, shortened
from blockcache_runtime.files.fields import Count, Limit, read

PathLike: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")

JSON_BYTES = 32 * 2**20
"""Of a JSON file or header. Ours have less than one megabyte."""
_UNPACKED, _RATIO = 256 * 2**20, 100  # an .npz may hold more than the first only if it is no more than so much packed


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


def exists(path: PathLike) -> bool:
    """Whether there is anything; a name that cannot be one is none. Path.exists raises there."""
    try:
        return os.path.exists(path)
    except (OSError, ValueError):
        return False


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
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, JSON_BYTES):
            raise FileError(f"the {what} {path} cannot be read (no safetensors header); it may be cut short, {again}")
        header = parse_json(file.read(length), f"header of the {what}", path)
        with reading(what, path, again):
            metadata: dict[str, str] = (
                read(dict[str, str] | None, header.pop("__metadata__", None), "__metadata__") or {}
            )
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


def _not_a_file(path: PathLike, what: str) -> FileError:
    kind = "a directory" if os.path.isdir(path) else "not a regular file"
    return FileError(f"cannot read the {what} {path}: it is {kind}")
