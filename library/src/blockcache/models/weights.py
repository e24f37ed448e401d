"""The numbers that a module holds: their hash, ways to tell that they changed, and which of them no action can come of.

Knows nothing of policies, engines or files.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError
from blockcache.models.program import Program, UnsupportedError
from blockcache.observations.tensors import largest
from blockcache_runtime.checks import LIMIT, beyond, within


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


# -- which numbers are refused, with one sentence each


def check_weight(name: str, weight: Tensor) -> None:
    """Refuse what is no floating point number, not finite, or so large that float32 cannot compute with it."""
    if not weight.is_floating_point():
        raise PolicyError(
            f"the weights hold {weight.dtype} in {name}, expected floating point numbers; save them as such"
        )
    if not within(reached := largest(weight)):
        raise PolicyError(
            f"the weights hold {beyond(reached)} in {name}; use a checkpoint from before training went astray"
        )


def check_mask(name: str, mask: Any) -> None:
    """Refuse an attention mask (..., seen) that is no mask, or that leaves a token nothing to attend to.

    Booleans say what is hidden; numbers are added to the scores, so that -inf hides, and a very negative one almost.
    """
    if not isinstance(mask, Tensor) or not mask.ndim:
        return
    scores = torch.zeros(mask.shape).masked_fill(mask.cpu(), -math.inf) if mask.dtype == torch.bool else mask
    check_weight(name, scores.clamp(min=0))  # keeps NaN
    blind = (scores == -math.inf).all(dim=-1).nonzero().tolist()
    if blind:
        raise PolicyError(f"{name} leaves token {blind[0][-1]} nothing to attend to: its row holds -inf alone")


def check_action_scale(scale: Tensor) -> None:
    """Refuse a normaliser that no action can be turned back from: robot units are the normalised ones through the scale."""
    small = (~(scale.flatten().abs() >= 1 / LIMIT)).nonzero().flatten().tolist()
    if small:
        raise PolicyError(
            f"the action normaliser's scale is {float(scale.flatten()[small[0]]):g} for value {small[0]} of an action, "
            "which cannot be turned back into robot units; fit the normaliser again (a constant value has scale 1)"
        )


def check_denoiser(denoiser: nn.Module) -> None:
    """Refuse a denoiser's weights. Whole numbers in modules that are not torch's own may be packed weights: their affair."""
    for place, module in denoiser.named_modules():
        for name, weight in module.named_parameters(place, recurse=False):
            if weight.is_floating_point() or type(module).__module__.startswith("torch."):
                check_weight(name, weight)


def check_program(program: Program) -> Program:
    """The program, unless folding its weights, or putting them in its precision, led out of the range."""
    tensors = {**program.weights, **{name: table.values for name, table in program.tables.items()}}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UnsupportedError(f"weights that are no floating point numbers ({name} is {tensor.dtype})")
        # a matrix that is a view of its transpose is looked at as it lies in memory: that is twenty times as fast
        lying = tensor.T if tensor.ndim == 2 and tensor.stride(0) == 1 else tensor
        if lying.numel() and float(lying.min()) < -LIMIT:  # a mask
            check_mask(name, tensor)
        else:
            check_weight(name, lying)
    return program
