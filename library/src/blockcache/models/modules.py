"""Modules in a state in which no schedule can be followed (compiled, hooked, or in train mode), and the numbers they hold:
their hash, ways to tell that they changed, and which of them no action can come of.

Dropout would falsify every comparison between steps; only modules whose mode changes what they compute are asked for it.
Knows nothing of policies, engines or files.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import zlib
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from blockcache.errors import PolicyError
from blockcache.models.program import Program, UnsupportedError
from blockcache.observations.tensors import largest
from blockcache_runtime.checks import LIMIT, beyond, within


class ModeCheck:
    """Finds the modules that behave differently in train mode once, so that each call can ask them."""

    def __init__(self, module: nn.Module) -> None:
        self._sensitive = [(name, item) for name, item in module.named_modules() if _has_modes(item)]

    def check(self) -> None:
        for name, module in self._sensitive:
            if module.training:
                where = f"{name or 'the policy itself'} ({type(module).__name__})"
                raise PolicyError(f"the policy is in train mode, as {where} shows; call policy.eval() first")


def _has_modes(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout) > 0
    if isinstance(module, _NormBase):
        return module.track_running_stats  # without, it looks at its input in both modes
    if isinstance(module, nn.RReLU):
        return True
    kind: Any = type(module)
    return _reads_mode(kind)


@functools.cache
def _reads_mode(kind: Any) -> bool:
    """Whether a method of a foreign class looks at `self.training`, behind its decorators and in functions within it."""
    foreign = [base for base in kind.__mro__ if not base.__module__.startswith("torch.")]
    members = [member for base in foreign for member in vars(base).values()]
    codes = [getattr(inspect.unwrap(item), "__code__", None) for item in map(_function, members)]
    while codes:
        code = codes.pop()
        if code is not None and "training" in code.co_names:
            return True
        codes += [inner for inner in getattr(code, "co_consts", ()) if isinstance(inner, CodeType)]
    return False


def _function(member: Any) -> Any:
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def check_not_compiled(module: nn.Module, called: str) -> None:
    """Refuse what torch.compile has been over: compiled code would not run what is put in the place of a layer's methods."""
    for name, part in module.named_modules():
        where = f"{called}.{name}" if name else called
        if hasattr(part, "_orig_mod"):
            way_out = f"{where} = {where}._orig_mod"
        elif getattr(part, "_compiled_call_impl", None) is not None:
            way_out = f"{where}._compiled_call_impl = None"
        else:
            continue
        raise _compiled(where, way_out)


def check_entry_not_compiled(policy: Any, entry: str) -> None:
    """The same of the method that makes a generation."""
    if hasattr(getattr(policy, entry, None), "_torchdynamo_orig_callable"):
        own = entry in getattr(policy, "__dict__", {})
        raise _compiled(f"policy.{entry}", f"del policy.{entry}" if own else "without the decorator")


def _compiled(where: str, way_out: str) -> PolicyError:
    return PolicyError(
        f"{where} was compiled by torch.compile, which hides its blocks; use the original ({way_out}), and compare "
        "with torch.compile in 'blockcache bench'"
    )


def runs_known_code(parts: Sequence[nn.Module], *others: type) -> bool:
    """Whether modules (and other classes) run nothing but code of this package and of torch, as it was written: no class,
    method or tensor from elsewhere stands in place of theirs, on a class or on one module alone, and there are no hooks."""
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return False
    classes = {kind for item in (*map(type, parts), *others) for kind in item.__mro__ if kind is not object}
    members = [member for kind in classes if _is_own(kind) for member in map(_function, vars(kind).values())]
    code = [*classes, *(member for member in members if isinstance(member, FunctionType))]
    known = all(str(getattr(item, "__module__", "")).partition(".")[0] in ("blockcache", "torch") for item in code)
    return known and not any(has_hook(part) or overridden(part) for part in parts)


def overridden(part: nn.Module) -> list[str]:
    """What this very module has in the place of methods of its class, or of its tensors and parts."""
    registered = {**part._parameters, **part._buffers, **part._modules}
    replaced = (name for name in vars(part) if name in registered or callable(getattr(type(part), name, None)))
    return [name for name in replaced if not _is_own(type(vars(part)[name]))]  # what this package put there is known


def refuse_overridden(parts: Iterable[tuple[str, nn.Module]], doing: str) -> None:
    """Refuse to make something of modules by their classes, settings and weights, where that would lose what replaced a
    part of one of them on the object alone.

    Args:
        parts: modules of a policy by name, as its `named_modules` gives them.
        doing: what cannot be done, for the error.
    """
    for place, part in parts:
        for name in overridden(part):
            where = ".".join(filter(None, ("policy", place, name)))
            raise PolicyError(
                f"{where} was replaced on this very object, and would be lost by {doing}; delete it, or make a class with "
                "it and a function that returns the policy (module:function)"
            )


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith("blockcache.")


def has_hook(part: nn.Module) -> bool:
    """Whether this very module, parts aside, runs something else than its class says."""
    return bool("forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks)


# -- weights: their hash, and whether they changed


def tensors_of(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Changes with every edit of a tensor that torch knows of, and with its place; none of its values is read."""
    return [(0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors]


def memory(tensor: Tensor) -> Tensor:
    """A view of the bytes that a tensor takes, one behind the other; what is written there later shows in it.

    Args:
        tensor: of any strides; gaps between its numbers are part of the view.
    """
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)


def checksum(pieces: Iterable[Tensor | memoryview]) -> int:
    """CRC-32 over bytes: no change of a single number up to 32 bits escapes it, others do once in four thousand million.

    Args:
        pieces: bytes one behind the other: memory, or tensors of bytes such as `memory` gives.
    """
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
    """Refuse a denoiser's weights. Whole numbers in modules that are not torch's own may be packed weights, and pass."""
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
