"""Modules in a state in which no schedule can be followed: compiled, hooked, or in train mode.

Dropout would make every comparison between steps a lie; asked are only modules whose mode does something.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from blockcache.errors import PolicyError


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
    """Refuse what torch.compile has been over: compiled code would go past what we put in a layer's place."""
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


def is_altered(module: nn.Module) -> bool:
    """Whether somebody put a hook on one of the modules, or something in place of its forward."""
    return any(map(has_hook, module.modules()))


def runs_known_code(parts: Sequence[nn.Module], *others: type) -> bool:
    """Whether modules (and other classes) run nothing but code of this package and of torch, as it was written: no class,
    method or tensor of somebody else took the place of theirs, on a class or on one module alone, and there are no hooks."""
    classes = {kind for item in (*map(type, parts), *others) for kind in item.__mro__ if kind is not object}
    members = [member for kind in classes if _is_own(kind) for member in map(_function, vars(kind).values())]
    code = [*classes, *(member for member in members if isinstance(member, FunctionType))]
    return all(map(_is_known, code)) and not any(has_hook(part) or overridden(part) for part in parts)


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


def _is_known(item: Any) -> bool:
    return str(getattr(item, "__module__", "")).partition(".")[0] in ("blockcache", "torch")


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith("blockcache.")


def has_hook(part: nn.Module) -> bool:
    """Whether this very module, parts aside, runs something else than its class says."""
    return bool("forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks)
