"""Files that torch.save wrote, opened without torch: a zip with one pickle and the numbers of every tensor beside it.

The pickle is read by `pickles`, so nothing of it runs. Tensors come as descriptions, checked against what really lies in the
file; their numbers are read when they are asked for. torch packs nothing, so a file holds no more than it is long: an
entry that is packed, locked, a link, or there twice is refused. Knows nothing of policies.
"""

from __future__ import annotations

import contextlib
import math
import stat
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from blockcache.errors import BlockcacheError, ContentError, FileError, in_one_line, short, shortened
from blockcache.files import PathLike, opened
from blockcache.foreign.pickles import MOST_BYTES, Call, Global, Persistent, kind_of, load_pickle

DIRECTORY_BYTES = 4 * 2**20
"""Of the list of all entries; that of a checkpoint with a thousand tensors takes a tenth of a megabyte."""
KINDS = {
    "FloatStorage": ("float32", 4),
    "DoubleStorage": ("float64", 8),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
}
"""torch's storages: what they are called as a dtype, and the bytes of one number."""
_REBUILT = ("_rebuild_tensor", "_rebuild_tensor_v2")
_WRAPPED = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_OLD = (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19")


@dataclass(frozen=True)
class Storage:
    """Numbers that lie one behind the other in one entry of the file."""

    entry: str
    dtype: str
    count: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose numbers are still in the file: all of them within its storage, none of them twice.

    `negative` is torch's negative bit: the tensor's numbers are those of the storage with the other sign.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    negative: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class TorchFile:
    """An open file. `content` is what its pickle describes; see `load_pickle`."""

    def __init__(self, file: BinaryIO, size: int, what: str, path: PathLike) -> None:
        self.path, self.what, self.size = path, what, size
        self._file = file
        start = file.read(len(_OLD[0]))
        file.seek(0)
        if not start.startswith(b"PK"):
            raise FileError(f"the {what} {path} {_other_format(start)}")
        try:
            self._archive = zipfile.ZipFile(cast(BinaryIO, _Sparing(file)))
            self._entries = _checked_entries(self._archive, size)
        except BlockcacheError as error:
            raise FileError(f"the {what} {path} is not as torch writes it ({error}); it is not opened") from error
        except Exception as error:  # zipfile raises a dozen kinds about bytes that are not its own
            raise self._cut_short(error) from error
        pickled = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickled) != 1:
            held = shortened(", ".join(self._entries), 200) or "nothing"
            raise FileError(f"the {what} {path} is a zip file, but none of torch's: expected one data.pkl, got {held}")
        self._folder = pickled[0].removesuffix("data.pkl")
        order = self._entries.get(f"{self._folder}byteorder")
        if order is not None and self._read(order, 16) != b"little":
            raise FileError(
                f"the {what} {path} was written on a machine with another order of bytes; save it again here"
            )
        self.content = load_pickle(bytes(self._read(self._entries[pickled[0]], MOST_BYTES)), what, path)

    def tensor(self, value: Any) -> StoredTensor:
        """The tensor that `value`, out of the pickle, describes; a ContentError if it describes none."""
        for _ in range(4):  # a parameter is a tensor in a wrapper
            if isinstance(value, Call) and _torch_function(value) in _WRAPPED and value.arguments:
                value = value.arguments[0]
        if not isinstance(value, Call) or _torch_function(value) not in _REBUILT or len(value.arguments) < 4:
            raise ContentError(f"expected a tensor, got {shortened(kind_of(value), 80)}")
        kept, offset, shape, stride = value.arguments[:4]
        storage = self._storage(kept)
        plain = _counts([offset]) and _counts(shape) and _counts(stride) and len(shape) == len(stride) <= 16
        if not plain:
            raise ContentError(f"a tensor of shape {short(shape)} and strides {short(stride)} at {short(offset)}")
        found = StoredTensor(storage, offset, tuple(shape), tuple(stride), _is_negative(value))
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if found.count else 0
        if found.count > storage.count or (found.count and last >= storage.count):
            raise ContentError(
                f"a tensor of shape {short(found.shape)} and strides {short(found.stride)} at {offset} reaches beyond the "
                f"{storage.count:,} numbers that are stored for it"
            )
        return found

    def read(self, storage: Storage) -> bytearray:
        """The bytes of a storage, as long as it says."""
        return self._read(self._entries[storage.entry], storage.bytes)

    def _storage(self, kept: Any) -> Storage:
        name = kept.name if isinstance(kept, Persistent) else None
        if not isinstance(name, tuple) or len(name) != 5 or name[0] != "storage" or not isinstance(name[2], str):
            raise ContentError("a tensor whose numbers are not in the file")
        kind, count = name[1], name[4]
        if not isinstance(kind, Global) or kind.name not in KINDS or not kind.module.startswith("torch"):
            raise ContentError(f"a tensor of {short(str(kind))}; known are {', '.join(KINDS)}")
        entry = f"{self._folder}data/{name[2]}"
        dtype, itemsize = KINDS[kind.name]
        if entry not in self._entries:
            raise ContentError(f"a tensor whose numbers should be in {short(entry)}, which the file lacks")
        held = self._entries[entry].file_size
        if not _counts([count]) or count * itemsize != held:
            raise ContentError(f"a tensor of {short(count)} numbers of {dtype}, for which there are {held:,} bytes")
        return Storage(entry, dtype, count, itemsize)

    def _read(self, entry: zipfile.ZipInfo, most: int) -> bytearray:
        if entry.file_size > most:
            raise FileError(
                f"the {self.what} {self.path} holds {entry.file_size:,} bytes in {short(entry.filename)}, expected {most:,} "
                "at most"
            )
        found = bytearray(entry.file_size)
        filled, view = 0, memoryview(found)
        try:
            with self._archive.open(entry) as source:  # compares its own header with the list's, and its checksum
                while filled < len(found) and (part := source.read(2**22)):
                    view[filled : filled + len(part)] = part
                    filled += len(part)
        except Exception as error:
            raise self._cut_short(error) from error
        if filled < len(found):
            raise self._cut_short(EOFError(entry.filename))
        return found

    def _cut_short(self, error: Exception) -> FileError:
        return FileError(
            f"the {self.what} {self.path} cannot be read ({in_one_line(error)}); it may be cut short, get it again"
        )


@contextlib.contextmanager
def open_torch_file(path: PathLike, what: str) -> Iterator[TorchFile]:
    """A file of torch.save to look into, as long as the context lasts; anything else is refused with one sentence.

    Args:
        path: The file.
        what: The thing in messages, such as "checkpoint".
    """
    with opened(path, what) as (file, size):
        yield TorchFile(file, size, what, path)


class _Sparing:
    """A file that is not read in large pieces: zipfile takes the list of entries at once, however long that says it is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        wanted = size if size >= 0 else DIRECTORY_BYTES + 1  # all the rest: zipfile has gone near to the end before
        found = self._file.read(wanted) if wanted <= DIRECTORY_BYTES + 1 else None
        if found is None or len(found) > DIRECTORY_BYTES:
            raise ContentError(f"a list of entries that takes more than {DIRECTORY_BYTES:,} bytes")
        return found


def _checked_entries(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The entries by name, if all of them are such as torch writes."""
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        name, parts = entry.filename, entry.filename.split("/")
        odd = next((words for words, holds in _oddities(entry, parts).items() if holds), None)
        if name in found:
            odd = "is there twice"
        if odd is not None:
            raise ContentError(f"the entry {short(name)} {odd}")
        found[name] = entry
    total = sum(entry.file_size for entry in found.values())
    if total > size:
        raise ContentError(f"its entries have {total:,} bytes, more than the {size:,} of the whole file")
    return found


def _oddities(entry: zipfile.ZipInfo, parts: list[str]) -> dict[str, bool]:
    return {
        "is a link": stat.S_ISLNK(entry.external_attr >> 16),
        "has a name that leads elsewhere": not all(parts) or ".." in parts or "\\" in entry.filename or ":" in parts[0],
        "is locked with a password": bool(entry.flag_bits & 1),
        "is packed": entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size,
    }


def _is_negative(call: Call) -> bool:
    """Whether torch's negative bit is set. What else is said behind shape, strides, gradient and hooks may change numbers,
    and is refused: the conjugate bit, say, or what a backend of torch writes there."""
    said = call.arguments[6] if len(call.arguments) == 7 and _torch_function(call) == "_rebuild_tensor_v2" else {}
    if len(call.arguments) > 7 or not isinstance(said, dict) or not said.keys() <= {"neg", "conj"}:
        raise ContentError(f"a tensor of which it says {short(call.arguments[6:])}, which is not known")
    if said.get("conj", False) is not False or not isinstance(said.get("neg", False), bool):
        raise ContentError("a tensor that is stored as its conjugate; save it with .resolve_conj()")
    return bool(said.get("neg", False))


def _torch_function(call: Call) -> str:
    function = call.function
    return function.name if isinstance(function, Global) and function.module == "torch._utils" else ""


def _counts(values: Any) -> bool:
    """Whether these are whole numbers from 0 to what a file can hold."""
    return isinstance(values, tuple | list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _other_format(start: bytes) -> str:
    if start.startswith(_OLD[1]):
        return "is in the format of torch before 1.6; load and save it with a newer torch, there where you trust it"
    if start[:1] == b"\x80":
        return "is a bare pickle, expected a checkpoint of torch.save"
    if len(start) >= 8 and struct.unpack("<Q", start[:8])[0] < 2**24 and start[8:9] == b"{":
        return "is a safetensors file, expected a checkpoint of torch.save"
    return "is no checkpoint of torch.save; it may be cut short or another file"
