"""How alike a block's outputs are at different steps: K x K matrices from K features. Arrays in, arrays out.

A feature is one block's residual at one step, flattened. Each function takes (K, F) and returns (K, K), symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def cosine(features: Array) -> Array:
    """Cosine similarity. Two zero vectors are equal (1); a zero vector resembles nothing else (0)."""
    norms = np.linalg.norm(features, axis=1)
    unit = features / np.where(norms > 0, norms, 1.0)[:, None]
    # |a - b|^2 = 2 - 2 cos for unit vectors; a matrix product would wait for BLAS threads, 60 times longer on a busy CPU
    similarity: Array = np.clip(1.0 - _pairs(unit, "sqeuclidean") / 2, -1.0, 1.0)
    zero = norms == 0
    similarity[zero] = similarity[:, zero] = 0.0
    similarity[np.ix_(zero, zero)] = 1.0
    np.fill_diagonal(similarity, 1.0)
    return similarity


def mse(features: Array) -> Array:
    """Mean squared difference."""
    return _distances(features, "sqeuclidean")


def l1(features: Array) -> Array:
    """Mean absolute difference."""
    return _distances(features, "cityblock")


def wasserstein(features: Array) -> Array:
    """Wasserstein-1 distance between the values of two features: mean absolute difference once both are sorted."""
    return _distances(np.sort(features, axis=1), "cityblock")


METRICS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {"cosine": cosine, "mse": mse, "l1": l1, "wasserstein": wasserstein}
)
SIMILARITIES = frozenset({"cosine"})
"""Metrics that are maximised; the others are distances."""


def _distances(features: Array, kind: str) -> Array:
    distances: Array = _pairs(features, kind) / features.shape[1]
    return distances


def _pairs(features: Array, kind: str) -> Array:
    from scipy.spatial.distance import pdist, squareform  # here: the names of metrics need not wait for it

    found: Array = squareform(pdist(features, kind))
    return found
