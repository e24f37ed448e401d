"""FLOPs of an adaLN DiT by its sizes. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass

from blockcache.block import FEED_FORWARD, SELF_ATTENTION, Block
from blockcache.models.flops import attention, feed_forward, linear

KINDS = (SELF_ATTENTION, FEED_FORWARD)
"""The blocks of a layer, in order."""
CHUNKS = 6
"""What a layer's modulation gives: shift, scale and gate of its attention, then of its MLP."""


@dataclass(frozen=True)
class DiTShape:
    """The sizes of a DiT that decide its cost. The defaults are LeRobot's; `cond_dim` is the conditioning vector's."""

    width: int = 512
    layers: int = 6
    tokens: int = 32
    cond_dim: int = 64
    time_dim: int = 256
    action_dim: int = 2
    hidden: int = 2048

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The cached blocks in execution order, with their costs."""
        costs = {
            SELF_ATTENTION: attention(self.tokens, self.tokens, self.width),
            FEED_FORWARD: feed_forward(self.tokens, self.width, self.hidden),
        }
        names = [(f"layers.{layer}.{kind}", kind) for layer in range(self.layers) for kind in KINDS]
        return tuple(Block(name, kind, order, costs[kind]) for order, (name, kind) in enumerate(names))

    @property
    def ends(self) -> int:
        """What no saving spares a step: the first and the last projection."""
        return linear(self.tokens, self.action_dim, self.width) + linear(self.tokens, self.width, self.action_dim)

    def modulation(self, features: int) -> int:
        """All layers' modulation by so many of the features."""
        return self.layers * linear(1, features, CHUNKS * self.width)

    @property
    def time(self) -> int:
        """The time's own features."""
        return feed_forward(1, self.time_dim, 2 * self.time_dim)

    @property
    def every_step(self) -> int:
        """What runs at every step whatever the schedule, as the denoiser is written."""
        return self.ends + self.time + self.modulation(self.time_dim + self.cond_dim)
