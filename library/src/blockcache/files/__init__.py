"""Files: formats with a strict reader, what values must look like, atomic writes. Knows no format's content.

What an export needs is in `blockcache_runtime.files`; everything is to be had from here.
"""

from blockcache.files.arrays import TensorInfo, parse_arrays, read_tensors, write_arrays
from blockcache.files.atomic import (
    check_writable,
    exists,
    make_directory,
    no_writer,
    only_writer,
    write_bytes,
    writing,
)
from blockcache.files.format import Format
from blockcache.files.json_files import read_json
from blockcache_runtime.files.fields import (
    Count,
    Fields,
    Limit,
    Name,
    Names,
    Positive,
    Steps,
    dict_of,
    expect_keys,
    list_of,
    plain_json,
    read,
)
from blockcache_runtime.files.opening import JSON_BYTES, PathLike, opened, parse_json, read_bytes, reading

__all__ = [
    "JSON_BYTES",
    "Count",
    "Fields",
    "Format",
    "Limit",
    "Name",
    "Names",
    "PathLike",
    "Positive",
    "Steps",
    "TensorInfo",
    "check_writable",
    "dict_of",
    "exists",
    "expect_keys",
    "list_of",
    "make_directory",
    "no_writer",
    "only_writer",
    "opened",
    "parse_arrays",
    "parse_json",
    "plain_json",
    "read",
    "read_bytes",
    "read_json",
    "read_tensors",
    "reading",
    "write_arrays",
    "write_bytes",
    "writing",
]
