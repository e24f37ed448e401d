"""Observations are trees: an array, or a mapping of arrays by name, one value for each sample of a batch in front.

This one room checks, cuts, deals out, hashes, stacks, saves and loads them. Knows nothing of policies. What needs torch is
imported when it is first asked for, so that simulators and verbs need not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockcache.observations.files import load_observations, save_observations
from blockcache.observations.trees import (
    batch_size,
    hash_observations,
    joined,
    one_moment,
    parts,
    pick,
    rows,
    split,
    stacked,
)

if TYPE_CHECKING:
    from blockcache.observations.tensors import (
        Observation,
        as_one_batch,
        as_tensor,
        check_finite,
        check_observation,
        check_tree,
        largest,
    )

__all__ = [
    "Observation",
    "as_one_batch",
    "as_tensor",
    "batch_size",
    "check_finite",
    "check_observation",
    "check_tree",
    "hash_observations",
    "joined",
    "largest",
    "load_observations",
    "one_moment",
    "parts",
    "pick",
    "rows",
    "save_observations",
    "split",
    "stacked",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.tensors"), name)
