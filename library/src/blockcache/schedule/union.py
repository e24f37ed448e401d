"""The paper's bubbling union (BUA): repairs update steps so that errors do not pass from block to block."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from blockcache.errors import ScheduleError
from blockcache.schedule.block import FEED_FORWARD, Block, kind_from_name


def bubbling_union(
    schedules: Mapping[str, Sequence[int]],
    upstream: Collection[str],
    blocks: Sequence[Block] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Each block of `upstream` is also computed wherever a feed-forward block strictly behind it is.

    The mapping's order is execution order. Without `blocks` the names' suffixes (SA, CA, FFN) give the kinds.
    """
    names = list(schedules)
    kinds = {block.name: block.kind for block in blocks} if blocks else {name: kind_from_name(name) for name in names}
    for what, given in (("upstream", upstream), ("schedules", names)):
        unknown = [name for name in given if name not in kinds or name not in schedules]
        if unknown:
            raise ScheduleError(f"unknown block {unknown[0]!r} in {what}; the blocks are {', '.join(names)}")
    result: dict[str, tuple[int, ...]] = {}
    behind: set[int] = set()  # update steps of all feed-forward blocks after the current one
    for name in reversed(names):
        own = {int(step) for step in schedules[name]}
        result[name] = tuple(sorted(own | behind if name in upstream else own))
        if kinds[name] == FEED_FORWARD:
            behind |= own
    return {name: result[name] for name in names}
