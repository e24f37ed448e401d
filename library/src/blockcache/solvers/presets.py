"""The twelve schedules printed in the paper's appendix (24 blocks, 100 steps, S = 10, n = 5)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from blockcache.block import FEED_FORWARD, Block, kind_from_name
from blockcache.errors import ScheduleError
from blockcache.fingerprint import Fingerprint
from blockcache.schedule.schedule import Schedule
from blockcache.solvers.bac import bubbling_union

STEPS = 100


def published_names() -> tuple[str, ...]:
    """The paper's tasks."""
    return tuple(_printed()["tasks"])


def published_schedule(name: str, union: bool = True) -> Schedule:
    """A printed schedule.

    Rows that the union does not touch are as printed. Two union rows are misprints; they are replaced by what the
    paper's own rule gives, and the schedule's `origin` says so.

    Args:
        name: One of `published_names()`.
        union: False gives the schedule before the bubbling union.
    """
    if name not in published_names():
        raise ScheduleError(f"no published schedule {name!r}, known are {', '.join(published_names())}")
    task = _printed()["tasks"][name]
    acs = {block: tuple(steps) for block, steps in task["acs"].items()}
    origin: dict[str, Any] = {"method": "blockwise", "updates": 10, "metric": "cosine", "source": f"paper, {name}"}
    if not union:
        return Schedule(STEPS, acs, Fingerprint(family="dp-t"), origin)
    # a selected block with no FFN behind it adds nothing and has no row in print, so `added` names all that matter
    updates = bubbling_union(acs, task["added"])
    corrected = {
        key.partition(" ")[2]: note for key, note in _printed()["misprints"].items() if key.startswith(name + " ")
    }
    origin |= {"method": "bac", "union": 5, "misprints_corrected": corrected}
    return Schedule(STEPS, updates, Fingerprint(family="dp-t"), origin)


def stretched_schedule(name: str, blocks: Sequence[Block], steps: int) -> Schedule:
    """A printed schedule, stretched to other blocks and another number of steps, to have something of its kind to time.

    A block gets the steps of a printed one of its kind (or of the feed-forward blocks) at the same depth.

    Args:
        name: One of `published_names()`.
        blocks: The policy's.
        steps: Of its generation.
    """
    printed = published_schedule(name)
    by_kind: dict[str, list[Sequence[int]]] = {}
    for row, updates in printed.updates.items():
        by_kind.setdefault(kind_from_name(row), []).append(updates)
    places = {block.kind: [other.name for other in blocks if other.kind == block.kind] for block in blocks}
    rows = {}
    for block in blocks:
        same, own = by_kind.get(block.kind, by_kind[FEED_FORWARD]), places[block.kind]
        source = same[own.index(block.name) * len(same) // len(own)]
        rows[block.name] = sorted({step * steps // STEPS for step in source})
    stretched = tuple(rows) != printed.blocks or steps != STEPS
    return Schedule(steps, rows, origin={"method": "bac", "source": f"paper, {name}", "stretched": stretched})


@cache
def _printed() -> dict[str, Any]:
    text = resources.files("blockcache").joinpath("assets", "published_schedules.json").read_text("utf-8")
    return json.loads(text)
