"""The matrices that cross-attention is folded into for the ONNX graph, in float64. Arrays only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.engines.compiled import CompiledLayer, CompiledPolicy

Array = npt.NDArray[Any]


def query_folded(policy: CompiledPolicy) -> Array:
    """(L * H, d / H, d + 1): from a key to the matrix that norm(x) is multiplied by, its bias as the last column."""
    return np.concatenate([_query(policy, layer) for layer in policy.layers])


def _query(policy: CompiledPolicy, layer: CompiledLayer) -> Array:
    augmented = np.concatenate([double(layer.query_w), double(layer.query_b)[None]])  # (d + 1, d)
    return augmented.reshape(policy.width + 1, policy.heads, policy.head_size).transpose(1, 2, 0)


def output_folded(policy: CompiledPolicy) -> Array:
    """(L * H, d / H, d): from a value to its share of the residual."""
    return np.concatenate([_output(policy, layer) for layer in policy.layers])


def _output(policy: CompiledPolicy, layer: CompiledLayer) -> Array:
    return double(layer.cross_w).reshape(policy.heads, policy.head_size, policy.width)


def time_shares(policy: CompiledPolicy) -> tuple[Array, Array, Array]:
    """The time token's columns of w (K, L, d, H) and b (K, L, H), and its rows of v (K, L, H, d)."""
    memory = double(policy.time_memory).reshape(-1, len(policy.layers), 2, policy.heads, policy.head_size)
    weights, values = [], []
    for index, layer in enumerate(policy.layers):
        keys, own = memory[:, index, 0], memory[:, index, 1]  # (K, H, d / H)
        weights.append(np.einsum("hed,khe->kdh", _query(policy, layer), keys))
        values.append(np.einsum("hed,khe->khd", _output(policy, layer), own))
    both = np.stack(weights, axis=1)  # (K, L, d + 1, H)
    return both[:, :, :-1], both[:, :, -1], np.stack(values, axis=1)


def double(tensor: Any) -> Array:
    return np.asarray(tensor.detach().cpu(), dtype=np.float64)
