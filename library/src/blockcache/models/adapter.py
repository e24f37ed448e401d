"""What an adapter says about a denoiser: where its blocks are and how to run one layer block by block.

An adapter is found by the shape of the denoiser, never by importing the code it came from. Knows nothing of schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from blockcache.block import Block
from blockcache.errors import PolicyError
from blockcache.models.program import Program

Route: TypeAlias = Callable[[str, Callable[[], Tensor]], Tensor]
"""(block's name, a function that computes its residual) -> the residual to add."""


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The parts of an FFN block that adds W2 phi(W1 norm(x) + b1) + b2, for analyses; `norm` takes x alone."""

    block: str
    norm: nn.LayerNorm
    first: nn.Linear
    activation: Callable[[Tensor], Tensor]
    second: nn.Linear


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of the stack. `forward(route, *args, **kwargs)` is the module's own forward, except that the residual
    of each block is whatever `route` returns for it; `stream` is the name of its first argument, the residual stream.
    `first_input` gives the first block's normalised input. Analyses look inside where a layer says how: `feed_forward` are
    the parts of its FFN, `values` give the W_V of its attention blocks by name."""

    module: nn.Module
    blocks: tuple[str, ...]
    forward: Callable[..., Tensor]
    first_input: Callable[[Tensor], Tensor]
    stream: str
    feed_forward: FeedForward | None = None
    values: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)


def second_argument(sample: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
    """The timestep of a denoiser that takes the sample, then the timestep."""
    return timestep


@dataclass(frozen=True, eq=False)
class Adapter:
    """A denoiser as blockcache sees it.

    `every_step` is the FLOPs of a step outside the blocks. Costs are 0 where the denoiser does not say how many tokens
    it has. `timestep(*args, **kwargs)` picks the timestep out of the denoiser's arguments. `fold` makes the program of the
    policy behind a port; without it the family has the patched engine only. `constant` are modules within the layers that
    see nothing but conditions: what they gave is kept within a generation, as long as they are given the same numbers.
    """

    family: str
    denoiser: nn.Module
    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    widths: Mapping[str, int]
    every_step: int
    timestep: Callable[..., Any] = second_argument
    fold: Callable[[Any], Program] | None = None
    constant: tuple[nn.Module, ...] = ()


def names_by_layer(blocks: Sequence[Block], layers: int) -> list[tuple[str, ...]]:
    """The names of the blocks of each layer, where all layers have as many."""
    count = len(blocks) // layers
    return [tuple(block.name for block in blocks[at : at + count]) for at in range(0, len(blocks), count)]


def check_unpatched(layer: nn.Module, where: str, methods: Iterable[str] = ("forward", "__call__")) -> None:
    """Refuse a layer in which something stands in the place of a method: routing its blocks would go past that."""
    for name, module in layer.named_modules():
        if patched := [method for method in methods if method in vars(module)]:
            place = f"{where}.{name}" if name else where
            raise PolicyError(
                f"{place}.{patched[0]} is already patched by something else; remove that patch first (an acceleration with "
                "disable(); blockcache.handle_of(policy) gives back a handle that was lost)"
            )
