"""The tables printed in the paper, row by row, from the package's copy of them. Averages are recomputed from the cells.

The printed averages mix conventions and some do not follow from their cells, so none of them is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

GROUPS = {"ph": "proficient human (PH)", "mh": "mixed human (MH)", "multi_stage": "multi-stage"}


@dataclass(frozen=True)
class Place:
    """Where a task stands in the printed main table; with `least`, episodes that score as much count as successes."""

    group: str
    cell: str
    least: float | None = None


PLACES: dict[str, tuple[Place, ...]] = {
    "pusht": (Place("ph", "pusht"),),
    **{f"robosuite-{scene}-{who}": (Place(who, scene),) for scene in ("lift", "can", "square") for who in ("ph", "mh")},
    "robosuite-tool-hang-ph": (Place("ph", "tool_hang"),),
    "robosuite-transport-ph": (Place("ph", "transport"),),
    "block-pushing": (Place("multi_stage", "block_pushing_p1", 0.49), Place("multi_stage", "block_pushing_p2", 1.0)),
    "kitchen": tuple(Place("multi_stage", f"kitchen_p{done}", done / 4) for done in range(1, 5)),
}
"""By our name of the task."""


@dataclass(frozen=True)
class Printed:
    """One row. A cell holds one success rate, or two: "max performance / average of last 10 checkpoints"."""

    cells: Mapping[str, tuple[float, ...]]
    gflops: float | None
    speed: float | None

    @property
    def average(self) -> tuple[float, ...]:
        """The mean over the tasks of the cells' first figures, and of their second ones."""
        columns = zip(*self.cells.values(), strict=True)
        return tuple(sum(column) / len(self.cells) for column in columns)


def printed_table(name: str) -> dict[str, dict[str, Printed]]:
    """Group of tasks -> name of the row -> row; a table without groups has one, "mixed tasks"."""
    value = _published()[name]
    flat = all("cells" in row for row in value.values())
    groups = {"mixed tasks": value} if flat else value
    return {
        GROUPS.get(group, group): {row: _row(content) for row, content in rows.items()}
        for group, rows in groups.items()
    }


def printed_cell(printed: str, place: Place) -> tuple[float, ...]:
    """What a table of the paper has for a task; nothing where it has no such cell.

    Args:
        printed: Which row of which table, such as "main/Full Precision".
        place: Of the task.
    """
    name, row = printed.split("/", 1)
    found = [
        group[row] for title, group in printed_table(name).items() if title in ("mixed tasks", GROUPS[place.group])
    ]
    cells = found[0].cells if found else {}
    return cells.get(place.cell) or cells.get(f"{place.cell}_{place.group}") or ()


def printed_rdt() -> tuple[str, float]:
    """What the text says of RDT-1B on ManiSkill, whose figure has no numbers, and how many times faster it gets at most."""
    value = _published()["rdt_1b_maniskill"]
    return str(value["notes"]), float(value["max_speed"])


def printed_robot() -> Mapping[str, Mapping[str, float]]:
    """Chunks in a second ("hz") and "success" of the methods on the paper's robot, by its name of the method."""
    found: Mapping[str, Mapping[str, float]] = _published()["real_world_franka"]
    return found


def full_gflops() -> float:
    """Of one chunk in full precision, as printed."""
    return float(_published()["full_precision_gflops"])


def _row(value: Mapping[str, Any]) -> Printed:
    cells = value["cells"]
    if "gflops" in value:
        return Printed({task: tuple(cell) for task, cell in cells.items()}, value["gflops"], value["speed"])
    speeds = [cell["speed"] for cell in cells.values()]  # printed for each task
    return Printed({task: (cell["success"],) for task, cell in cells.items()}, None, sum(speeds) / len(speeds))


@cache
def _published() -> dict[str, Any]:
    text = resources.files("blockcache_lab").joinpath("assets", "published_results.json").read_text("utf-8")
    value: dict[str, Any] = json.loads(text)
    return value
