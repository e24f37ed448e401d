"""FLOPs of a model's parts, by formula: 2 x MACs, attention products included, batch 1.

Norms, activations and softmax are not counted, as in the paper. Knows nothing of torch.
"""

from __future__ import annotations


def linear(tokens: int, inputs: int, outputs: int) -> int:
    return 2 * tokens * inputs * outputs


def attention(queries: int, keys: int, width: int) -> int:
    """Projections of q, k, v and the output, and the two products; keys and values are projected here too."""
    projections = linear(queries, width, width) + linear(keys, width, 2 * width) + linear(queries, width, width)
    products = 2 * linear(queries, width, keys)
    return projections + products


def feed_forward(tokens: int, width: int, hidden: int) -> int:
    return linear(tokens, width, hidden) + linear(tokens, hidden, width)
