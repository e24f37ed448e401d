"""Observations are trees: an array, or a mapping of arrays by name, one value for each sample of a batch in front.

This room checks, cuts, deals out, hashes, stacks, saves and loads them. Knows nothing of policies. What needs torch is in
`observations.tensors`, so that simulators and verbs need not wait for it.
"""

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

__all__ = [
    "batch_size",
    "hash_observations",
    "joined",
    "load_observations",
    "one_moment",
    "parts",
    "pick",
    "rows",
    "save_observations",
    "split",
    "stacked",
]
