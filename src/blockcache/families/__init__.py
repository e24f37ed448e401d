"""Model families, found through a registry.

A family is a function `find(denoiser) -> Adapter | None`. Ours are listed here; others register one under the entry
point group `blockcache.families`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from torch import nn

from blockcache.errors import PolicyError
from blockcache.families import dpt
from blockcache.families.base import Adapter, Layer, Route

__all__ = ["Adapter", "Layer", "Route", "adapter_for"]

Find = Callable[[nn.Module], Adapter | None]


def adapter_for(denoiser: nn.Module) -> Adapter:
    """The first family that recognises the denoiser; one that recognises it but cannot use it says why."""
    finders: dict[str, Find] = {"dp-t": dpt.find}
    for entry in entry_points(group="blockcache.families"):
        finders.setdefault(entry.name, entry.load())
    for find in finders.values():
        adapter = find(denoiser)
        if adapter is not None:
            return adapter
    raise PolicyError(
        f"no model family fits the denoiser {type(denoiser).__name__}; known are {', '.join(finders)} "
        "(others can register under the entry point group 'blockcache.families')"
    )
