"""Pictures of values for the terminal. Plain text, no colours, so that it can be piped and pasted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockcache.schedule import Schedule

COLUMNS = 100


def schedule_picture(schedule: Schedule) -> str:
    """One row a block, one column a step (or a few steps): `#` computed, `.` reused; the number of updates behind it."""
    per_column = -(-schedule.steps // COLUMNS)
    columns = -(-schedule.steps // per_column)
    width = max(len(name) for name in schedule.blocks)
    lines = [_title(schedule), "", f"{'':{width}}  {_ruler(columns, per_column)}"]
    for name, steps in schedule.updates.items():
        marked = {step // per_column for step in steps}
        row = "".join("#" if column in marked else "." for column in range(columns))
        lines.append(f"{name:{width}}  {row} {len(steps):4d}")
    computing = [sum(step in steps for steps in schedule.update_sets.values()) for step in range(schedule.steps)]
    idle = computing.count(0)
    lines += [
        "",
        f"# computed, . reused; one column is {per_column} step{'s' if per_column > 1 else ''}, the first step comes first",
        f"{schedule.computed} of {schedule.steps * len(schedule.blocks)} block computations ({schedule.reused_share:.1%} "
        f"reused); {idle} of {schedule.steps} steps compute nothing",
    ]
    return "\n".join(lines)


def _title(schedule: Schedule) -> str:
    origin = schedule.origin
    named = {"updates": "S", "union": "n", "metric": "metric", "source": "from"}
    facts = [f"{label} = {origin[key]}" for key, label in named.items() if key in origin]
    corrected = origin.get("misprints_corrected") or {}
    note = f"; misprint corrected in {', '.join(corrected)}" if corrected else ""
    return f"{origin.get('method', 'schedule')}, K = {schedule.steps}" + "".join(f", {fact}" for fact in facts) + note


def _ruler(columns: int, per_column: int) -> str:
    marks = [" "] * (columns + 6)
    for column in range(0, columns, 10):
        label = str(column * per_column)
        marks[column : column + len(label)] = label
    return "".join(marks).rstrip()
