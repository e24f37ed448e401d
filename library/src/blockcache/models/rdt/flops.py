"""FLOPs of RDT by its sizes. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockcache.block import CROSS_ATTENTION, FEED_FORWARD, SELF_ATTENTION, Block
from blockcache.models.flops import attention, feed_forward, linear


@dataclass(frozen=True)
class RDTShape:
    """The sizes that decide the cost.

    tokens: of the sequence, three more than actions.
    conditions: language and image tokens.
    adaptors: by adaptor (language, image, state) the inputs of each of its matrices.
    """

    width: int
    layers: int
    tokens: int
    horizon: int
    action_dim: int
    conditions: tuple[int, int]
    adaptors: tuple[Sequence[int], Sequence[int], Sequence[int]]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """In execution order, with their costs: keys and values of the conditions are projected at every use."""
        return tuple(
            self._block(layer, kind, 3 * layer + place) for layer in range(self.layers) for place, kind in _KINDS
        )

    def _block(self, layer: int, kind: str, order: int) -> Block:
        width, seen = self.width, self.conditions[layer % 2]
        costs = {
            SELF_ATTENTION: attention(self.tokens, self.tokens, width),
            CROSS_ATTENTION: attention(self.tokens, seen, width),
            FEED_FORWARD: feed_forward(self.tokens, width, width),
        }
        return Block(f"layers.{layer}.{kind}", kind, order, costs[kind])

    @property
    def every_step(self) -> int:
        """What runs at every step whatever the schedule: the sample's adaptor, two embeddings, the final layer."""
        *_, state = self.adaptors
        embeddings = 2 * (linear(1, 256, self.width) + linear(1, self.width, self.width))
        return self._adapted(self.horizon, state) + embeddings + self._final(self.tokens)

    @property
    def folded_blocks(self) -> tuple[Block, ...]:
        """What remains where keys and values are projected once."""
        return tuple(
            replace(block, cost=block.cost - linear(self.conditions[block.order // 3 % 2], self.width, 2 * self.width))
            if block.kind == CROSS_ATTENTION
            else block
            for block in self.blocks
        )

    @property
    def folded_every_step(self) -> int:
        """The time's embedding is tabulated, the frequency's made once; the mask's share of the adaptor too; only actions
        leave."""
        first, *others = self.adaptors[2]
        return self._adapted(self.horizon, [first // 2, *others]) + self._final(self.horizon)

    @property
    def adapting(self) -> int:
        """Once per generation, in any engine: the conditions' adaptors."""
        return sum(map(self._adapted, (*self.conditions, 1), self.adaptors))

    @property
    def folded_once(self) -> int:
        """With the frequency's embedding, and all keys and values; the mask's share is part of the state's adaptor."""
        return self.around + linear(sum(self.conditions[i % 2] for i in range(self.layers)), self.width, 2 * self.width)

    @property
    def around(self) -> int:
        """Without keys and values."""
        return self.adapting + linear(1, 256, self.width) + linear(1, self.width, self.width)

    def _adapted(self, tokens: int, inputs: Sequence[int]) -> int:
        return sum(linear(tokens, size, self.width) for size in inputs)

    def _final(self, tokens: int) -> int:
        return linear(tokens, self.width, self.width) + linear(tokens, self.width, self.action_dim)


_KINDS = tuple(enumerate((SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD)))
