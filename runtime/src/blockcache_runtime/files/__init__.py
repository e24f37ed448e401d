"""Files: a format with a strict reader, what values must look like, and how a file is opened. Knows no format's content."""

from blockcache_runtime.files.fields import Count, Fields, Limit, Name, Names, Positive, Steps, read
from blockcache_runtime.files.format import Format
from blockcache_runtime.files.opening import PathLike, opened, read_bytes, reading

__all__ = [
    "Count",
    "Fields",
    "Format",
    "Limit",
    "Name",
    "Names",
    "PathLike",
    "Positive",
    "Steps",
    "opened",
    "read",
    "read_bytes",
    "reading",
]
