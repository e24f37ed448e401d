"""The numbers that a module holds: their hash, and ways to tell that they changed. Knows nothing of policies."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def tensors_of(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Changes with every edit of a tensor that torch knows of, and with its place; none of its values is read."""
    return [(0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors]


def memory(tensor: Tensor) -> Tensor:
    """A view of the bytes that a tensor takes, one behind the other; what is written there later shows in it."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)


def checksum(pieces: Iterable[Tensor | memoryview]) -> int:
    """CRC-32 over bytes: no change of a single number up to 32 bits escapes it, others do once in four thousand million."""
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece.cpu().numpy().data if isinstance(piece, Tensor) else piece, found)
    return found


def weights_hash(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all parameters and buffers.

    The public code's `_dummy_variable`s are left out, so that its policy and this package's have the same hash.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if name.endswith("_dummy_variable"):
            continue
        if not isinstance(tensor, Tensor):  # a module's extra state; of unknown type, so only its presence counts
            digest.update(f"{name} {type(tensor).__name__}\n".encode())
            continue
        array = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}\n".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().data if array.numel() else b"")
    return digest.hexdigest()
