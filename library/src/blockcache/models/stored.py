"""What converters of other projects' files share: tensors that torch.save wrote, and errors that name the file.

The file is read by `foreign`, and nothing of it is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from blockcache.errors import BlockcacheError, ContentError, FileError
from blockcache.files import PathLike
from blockcache.foreign.torch_file import StoredTensor, TorchFile
from blockcache.progress import progress_bar


def read_stored(file: TorchFile, tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The tensors by name; those that share numbers in the file share them here too."""
    buffers: dict[str, bytearray] = {}
    found = {}
    total = sum(storage.bytes for storage in {tensor.storage for tensor in tensors.values()})
    with progress_bar(desc="converting", total=total, unit="B", unit_scale=True, leave=False, delay=2.0) as bar:
        for name, stored in tensors.items():
            dtype, storage = getattr(torch, stored.storage.dtype), stored.storage
            if not stored.count:
                found[name] = torch.empty(stored.shape, dtype=dtype)
                continue
            if storage.entry not in buffers:
                buffers[storage.entry] = file.read(storage)
                bar.update(storage.bytes)
            numbers = torch.frombuffer(buffers[storage.entry], dtype=dtype)
            values = numbers.as_strided(stored.shape, stored.stride, stored.offset)
            found[name] = values.neg() if stored.negative else values
    return found


@contextlib.contextmanager
def naming(source: PathLike, what: str) -> Iterator[None]:
    """Whatever is wrong inside is said of this file; a FileError names it already."""
    try:
        yield
    except FileError:
        raise
    except ContentError as error:
        raise FileError(f"the {what} {source} cannot be converted: {error}") from error
    except BlockcacheError as error:
        raise type(error)(f"{source}: {error}") from error
