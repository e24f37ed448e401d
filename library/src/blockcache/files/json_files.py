"""JSON files, as they are or gzipped: `NAME.json` may lie there as `NAME.json.gz`. Knows no format's content."""

from __future__ import annotations

import os
import zlib
from typing import Any

from blockcache.errors import FileError
from blockcache_runtime.files import JSON_BYTES, PathLike, parse_json, read_bytes

JSON, PACKED = ".json", ".json.gz"


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
