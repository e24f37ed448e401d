"""FLOPs of a model's parts, by formula: 2 x MACs, attention products included, batch 1.

Norms, activations and softmax are not counted, as in the paper. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from blockcache.block import CROSS_ATTENTION, FEED_FORWARD, SELF_ATTENTION, Block


def blocks_of(layers: int, costs: Callable[[int], Mapping[str, int]]) -> tuple[Block, ...]:
    """The cached blocks of a stack in execution order; `costs` gives the kinds of a layer's blocks, with their FLOPs."""
    found = [(layer, kind, cost) for layer in range(layers) for kind, cost in costs(layer).items()]
    return tuple(Block(f"layers.{layer}.{kind}", kind, order, cost) for order, (layer, kind, cost) in enumerate(found))


def linear(tokens: int, inputs: int, outputs: int) -> int:
    """A matrix.

    Args:
        tokens: rows that are multiplied.
        inputs: numbers of a row.
        outputs: numbers that it becomes.
    """
    return 2 * tokens * inputs * outputs


def attention(queries: int, keys: int, width: int) -> int:
    """Projections of q, k, v and the output, and the two products; keys and values are projected here too.

    Args:
        queries: tokens that attend.
        keys: tokens that are attended to; their number is that of the queries in self-attention.
        width: numbers of a token.
    """
    projections = linear(queries, width, width) + linear(keys, width, 2 * width) + linear(queries, width, width)
    products = 2 * linear(queries, width, keys)
    return projections + products


def feed_forward(tokens: int, width: int, hidden: int) -> int:
    """Two matrices, one behind the other.

    Args:
        tokens: how many go through both.
        width: numbers of a token.
        hidden: numbers of the layer between.
    """
    return linear(tokens, width, hidden) + linear(tokens, hidden, width)


# -- DP-T, in a module without torch: the command line counts with it


@dataclass(frozen=True)
class DPTShape:
    """The sizes of a DP-T denoiser that decide its cost.

    The defaults are the reference shape of the paper's schedules: 15.74 GFLOP for 100 steps. In the encoder-only form
    (`cond_tokens` = 0) the time is one of the `tokens` and there is no cross-attention.
    """

    width: int = 256
    layers: int = 8
    tokens: int = 10
    cond_tokens: int = 3
    cond_dim: int = 66
    input_dim: int = 2
    output_dim: int = 2
    cond_layers: int = 0
    hidden: int | None = None  # of the trunk's feed-forward blocks; 4 x width where nothing else is said

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The cached blocks in execution order, with their costs."""
        costs = {SELF_ATTENTION: attention(self.tokens, self.tokens, self.width)}
        if self.cond_tokens:
            costs[CROSS_ATTENTION] = attention(self.tokens, self.cond_tokens, self.width)
        costs[FEED_FORWARD] = feed_forward(self.tokens, self.width, self.hidden or 4 * self.width)
        return blocks_of(self.layers, lambda layer: costs)

    @property
    def every_step(self) -> int:
        """What runs at every step whatever the schedule: embeddings, condition encoder, head."""
        action_tokens = self.tokens if self.cond_tokens else self.tokens - 1
        ends = linear(action_tokens, self.input_dim, self.width) + linear(action_tokens, self.width, self.output_dim)
        observations = linear(max(self.cond_tokens - 1, 0), self.cond_dim, self.width)
        return ends + observations + self._encoder

    @property
    def _encoder(self) -> int:
        if not self.cond_tokens:
            return 0
        mlp = feed_forward(self.cond_tokens, self.width, 4 * self.width)
        if not self.cond_layers:
            return mlp
        return self.cond_layers * (attention(self.cond_tokens, self.cond_tokens, self.width) + mlp)


def folded_blocks(shape: DPTShape, heads: int) -> tuple[Block, ...]:
    """The blocks with what remains of their costs where cross-attention's queries, keys, values and outputs are folded."""
    cross = 2 * linear(shape.tokens, shape.width, heads * shape.cond_tokens)
    return tuple(replace(block, cost=cross) if block.kind == CROSS_ATTENTION else block for block in shape.blocks)


def folded_every_step(shape: DPTShape) -> int:
    """What remains of a step outside the blocks: the ends. Conditions are encoded once."""
    return linear(shape.tokens, shape.input_dim, shape.width) + linear(shape.tokens, shape.width, shape.output_dim)


def folded_once(shape: DPTShape) -> int:
    """What a generation does once: encode the observations, project them to keys and values, fold these."""
    observed, width = shape.cond_tokens - 1, shape.width
    encoded = linear(observed, shape.cond_dim, width) + feed_forward(observed, width, 4 * width)
    folded = linear(observed, width, width + 1) + linear(observed, width, width)
    return encoded + shape.layers * (linear(observed, width, 2 * width) + folded)
