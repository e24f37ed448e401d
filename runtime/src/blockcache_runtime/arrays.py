"""Files of arrays, .npz and .npy. No pickle is read, and nothing is made larger than the file that it is in."""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache_runtime.atomic import PathLike, write_bytes
from blockcache_runtime.errors import FileError, in_one_line

_UNPACKED, _RATIO = 256 * 2**20, 100  # bytes that an .npz may unpack to, or so many times its own size if that is more


def parse_arrays(data: bytes, what: str, path: PathLike) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file by name, or that of an .npy file under "obs". None of Python's objects, no pickle.

    Args:
        data: The content of the file.
        what: What the file is called in errors, such as "observation log".
        path: Where the content came from, for errors alone.
    """
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
    """An .npz file of plain arrays by name.

    Args:
        path: The file to write; its directory must exist.
        arrays: Arrays of numbers; each is stored under the name of its argument.
    """
    buffer = io.BytesIO()
    # Not by np.savez_compressed: before numpy 2 it cannot forbid pickles, and takes `allow_pickle` for one more array.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
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
