"""A Block: one residual branch of a transformer layer, the unit that is cached. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass

from blockcache.files import Count, Name

SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD = "SA", "CA", "FFN"


@dataclass(frozen=True)
class Block:
    """Name as in the paper (`layers.3.FFN`), kind, place in execution order, and FLOPs of computing it once."""

    name: Name
    kind: Name
    order: Count
    cost: Count


def kind_from_name(name: str) -> str:
    """The part after the last dot. Only for bare names: where a Block is at hand, its `kind` decides.

    Args:
        name: A block's name, such as `layers.3.FFN`.
    """
    return name.rpartition(".")[2]
