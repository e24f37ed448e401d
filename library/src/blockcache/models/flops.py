"""FLOPs of a model's parts, by formula: 2 x MACs, attention products included, batch 1.

Norms, activations and softmax are not counted, as in the paper. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from blockcache.block import Block


def blocks_of(layers: int, costs: Callable[[int], Mapping[str, int]]) -> tuple[Block, ...]:
    """The cached blocks of a stack in execution order; `costs` gives the kinds of a layer's blocks, with their FLOPs."""
    found = [(layer, kind, cost) for layer in range(layers) for kind, cost in costs(layer).items()]
    return tuple(Block(f"layers.{layer}.{kind}", kind, order, cost) for order, (layer, kind, cost) in enumerate(found))


def linear(tokens: int, inputs: int, outputs: int) -> int:
    return 2 * tokens * inputs * outputs


def attention(queries: int, keys: int, width: int) -> int:
    """Projections of q, k, v and the output, and the two products; keys and values are projected here too."""
    projections = linear(queries, width, width) + linear(keys, width, 2 * width) + linear(queries, width, width)
    products = 2 * linear(queries, width, keys)
    return projections + products


def feed_forward(tokens: int, width: int, hidden: int) -> int:
    return linear(tokens, width, hidden) + linear(tokens, hidden, width)
