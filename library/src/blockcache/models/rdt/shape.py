"""An RDT policy with random weights, by its sizes: speed does not depend on the weights."""

from __future__ import annotations

import torch

from blockcache.models.rdt.policy import RDTConfig, RDTPolicy


def random_policy(config: RDTConfig, seed: int = 0) -> RDTPolicy:
    """Always the same weights for one seed, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return RDTPolicy(config).eval()
