"""DP-T, the transformer of Diffusion Policy: how it is found, its blocks, its program, our own policy and its files."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockcache.models.dpt.checkpoint import load_policy, save_policy
    from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig

__all__ = ["DPTConfig", "DiffusionTransformerPolicy", "load_policy", "save_policy"]


def __getattr__(name: str) -> Any:  # the formulas in `flops` need not wait for torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'policy' if name[0] == 'D' else 'checkpoint'}"), name)
