"""Tensors of a file that torch.save wrote, as torch has them; the file is read by `foreign`, and nothing of it is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from blockcache.foreign.torch_file import StoredTensor, TorchFile


def read_stored(file: TorchFile, tensors: Mapping[str, StoredTensor], tick: Callable[[int], Any]) -> dict[str, Tensor]:
    """The tensors by name; those that share numbers in the file share them here too. `tick` is told of bytes read."""
    buffers: dict[str, bytearray] = {}
    found = {}
    for name, stored in tensors.items():
        dtype, storage = getattr(torch, stored.storage.dtype), stored.storage
        if not stored.count:
            found[name] = torch.empty(stored.shape, dtype=dtype)
            continue
        if storage.entry not in buffers:
            buffers[storage.entry] = file.read(storage)
            tick(storage.bytes)
        numbers = torch.frombuffer(buffers[storage.entry], dtype=dtype)
        found[name] = numbers.as_strided(stored.shape, stored.stride, stored.offset)
    return found
