"""Train mode: dropout would make every comparison between steps a lie. Looks only at modules whose mode does something."""

from __future__ import annotations

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
    if isinstance(module, nn.MultiheadAttention):
        return float(module.dropout) > 0
    if isinstance(module, _NormBase | nn.RReLU):
        return True
    return any(_reads_mode(vars(kind)) for kind in type(module).__mro__ if not kind.__module__.startswith("torch."))


def _reads_mode(members: Any) -> bool:
    """Whether a method of a foreign class looks at `self.training`."""
    functions = (getattr(member, "__func__", member) for member in members.values())
    return any("training" in getattr(getattr(item, "__code__", None), "co_names", ()) for item in functions)
