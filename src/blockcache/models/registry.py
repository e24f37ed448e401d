"""Model families, found through a registry.

A family is a function `find(denoiser) -> Adapter | None`. Ours are listed here; others register one under the entry
point group `blockcache.families`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from torch import nn

from blockcache.errors import PolicyError
from blockcache.models.adapter import Adapter
from blockcache.models.dpt import adapter as dpt

Find = Callable[[nn.Module], Adapter | None]


def adapter_for(denoiser: nn.Module) -> Adapter:
    """The first family that recognises the denoiser; one that recognises it but cannot use it says why."""
    adapter = dpt.find(denoiser)
    entries = entry_points(group="blockcache.families") if adapter is None else ()
    for entry in entries:
        adapter = _load(entry)(denoiser)
        if adapter is not None:
            break
    if adapter is None:
        known = ", ".join(dict.fromkeys(("dp-t", *(entry.name for entry in entries))))
        raise PolicyError(
            f"no model family fits the denoiser {type(denoiser).__name__}; known are {known} "
            "(others can register under the entry point group 'blockcache.families')"
        )
    return adapter


def _load(entry: EntryPoint) -> Find:
    try:
        find: Find = entry.load()
    except Exception as error:
        raise PolicyError(f"the model family {entry.name!r} of {entry.value} cannot be loaded: {error}") from error
    return find
