"""Files: formats with a strict reader, what values must look like, atomic writes. Knows no format's content.

What an export needs is in `blockcache_runtime.files`; everything is to be had from here.
"""

from blockcache.files.arrays import TensorInfo, parse_arrays, read_metadata, read_tensors, write_arrays
from blockcache.files.atomic import (
    check_writable,
    exists,
    make_directory,
    no_writer,
    only_writer,
    write_bytes,
    writing,
)
from blockcache.files.format import Format, JsonFile, dict_of, header_of, header_text, keys_of, list_of
from blockcache.files.json_files import read_json
from blockcache_runtime.fields import (
    Count,
    Fields,
    Limit,
    Name,
    Names,
    Positive,
    Steps,
    expect_keys,
    read,
)
from blockcache_runtime.files import JSON_BYTES, PathLike, opened, parse_json, read_bytes, reading

__all__ = [
    "JSON_BYTES",
    "Count",
    "Fields",
    "Format",
    "JsonFile",
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
    "header_of",
    "header_text",
    "keys_of",
    "list_of",
    "make_directory",
    "no_writer",
    "only_writer",
    "opened",
    "parse_arrays",
    "parse_json",
    "read",
    "read_bytes",
    "read_json",
    "read_metadata",
    "read_tensors",
    "reading",
    "write_arrays",
    "write_bytes",
    "writing",
]
