"""The hash of an export: its last metadata entry, over every byte before it. Knows nothing of graphs.

It finds accidents: a flipped bit, a file that was cut short, an edit. It is no signature: who changes a file on purpose
can write a hash that fits.
"""

from __future__ import annotations

import hashlib

KEY = "blockcache.sha256"
# protobuf merges what is appended, so the entry is laid behind the file and needs no place inside:
# metadata_props {key: KEY, value: 64 hexadecimal digits}
_ENTRY = b"\x72\x55\x0a\x11" + KEY.encode() + b"\x12\x40"
_LENGTH = len(_ENTRY) + 64


def with_hash(content: bytes) -> bytes:
    """A serialised model with its hash behind it; the model must have none yet."""
    return content + _entry(content)


def is_intact(data: bytes) -> bool:
    """Whether a file is, byte by byte, what `with_hash` made."""
    return data[-_LENGTH:] == _entry(memoryview(data)[:-_LENGTH])


def has_hash(data: bytes) -> bool:
    """Whether a hash is there at all, fitting or not."""
    return data[-_LENGTH:-64] == _ENTRY


def _entry(content: bytes | memoryview) -> bytes:
    # of the hashes in Python's library the fastest on processors with SHA instructions, which robots' have, too
    return _ENTRY + hashlib.sha256(content).hexdigest().encode()
