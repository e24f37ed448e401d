"""RDT, the Robotics Diffusion Transformer: how it is found, its blocks, its program, our own policy and its files."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockcache.models.rdt.checkpoint import load_policy, save_policy
    from blockcache.models.rdt.config import RDTConfig
    from blockcache.models.rdt.policy import RDTPolicy

__all__ = ["RDTConfig", "RDTPolicy", "load_policy", "save_policy"]
_HOMES = {"RDTConfig": "config", "RDTPolicy": "policy", "load_policy": "checkpoint", "save_policy": "checkpoint"}


def __getattr__(name: str) -> Any:  # the formulas in `flops` need not wait for torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
