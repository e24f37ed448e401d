"""docs/generated/guard.md, from the files that `blockcache paper guard` wrote, one for each shift, and one of other tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockcache.files import Count, Fields, Format, list_of
from blockcache.measure.statistics import mean_interval, paired_difference
from blockcache.report.document import Bullets, Document, Paragraph, Section, plain, table
from blockcache.report.methods import estimate

FULL, ALONE, FALLING_BACK = "full precision", "alone", "with fall-back"
_ROW = Fields(
    {
        "method": str,
        "scores": dict[str, list[float]],
        "chunks": Count,
        **dict.fromkeys(("outside", "repeated", "episodes"), float),
    },
    {"changes": float},
)
FORMAT = Format(
    "blockcache.guard",
    "file of a guard's alarms",
    {
        "command": str,
        "shift": str,
        "words": str,
        "rollouts": Count,
        "first_seed": Count,
        "observations": Count,
        "rows": list_of(_ROW),
        "others": list_of(Fields({"guard": str, "outside": dict[str, float]})),
    },
    optional=("made_by", "others"),
)


def page(contents: Sequence[Mapping[str, Any]]) -> Document:
    """The whole page.

    Args:
        contents: Of the files, in any order.
    """
    files = sorted(contents, key=lambda one: (one["shift"] != "none", one["shift"]))
    rows = [(one, row) for one in files for row in one["rows"]]
    others = [item for one in files for item in one.get("others", ())]
    first = files[0]
    about = (
        f"A guard was fitted to the {first['observations']} observations that ship with the policy. Each cell has "
        f"{first['rollouts']} episodes of Push-T from seed {first['first_seed']}, on which nothing was chosen, with the same "
        "noise in every way of answering. *Outside*: the share of chunks whose observation is farther than 99 % of held-out "
        "ones; *repeated*: seen before, number by number; *episodes*: with one outside. *Changes*: the share that the other "
        "signal finds, how much cached blocks change from update to update (each in log, and the same distance). With "
        "fall-back, what is outside is answered in full precision; the scores are means with 95 % intervals."
    )
    shares = ("outside", "repeated", "episodes", "changes")
    alarms, scores = list[list[str]](), list[list[str]]()
    for one, row in rows:
        names, found = [plain(one["words"]), plain(row["method"])], row["scores"]
        alarms.append([*names, str(row["chunks"]), *(f"{row[name]:.1%}" if name in row else "" for name in shares)])
        means = [estimate(mean_interval(found[way]), "{:.2f}") for way in (FULL, ALONE, FALLING_BACK)]
        scores.append([*names, *means, estimate(paired_difference(found[FALLING_BACK], found[ALONE]), "{:+.3f}")])
    columns = ["what is changed", "method"]
    noticed = table([*columns, "chunks", *shares], alarms, left=2)
    helped = table([*columns, FULL, ALONE, FALLING_BACK, "difference"], scores, left=2)
    blocks = [Section("What it notices", (noticed,)), Section("Whether full precision helps then", (helped,))]
    if others:
        names = [item["guard"] for item in others]
        cells = [[plain(item["guard"]), *(f"{item['outside'][name]:.1%}" for name in names)] for item in others]
        note = "Outside, of other tasks' observations, and on the diagonal of those that the guard was not fitted to (64 of each)."
        blocks.append(Section("Other tasks", (Paragraph(note), table(["guard of", *map(plain, names)], cells))))
    commands = dict.fromkeys(one["command"] for one in files)
    said = Bullets((*_verdicts(rows), *(f"Command: `{command}`." for command in commands)))
    return Document("What a guard notices, and whether full precision helps then", (Paragraph(about), said, *blocks))


def _verdicts(rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    fresh = [f"{row['outside']:.1%} of chunks ({row['method']})" for one, row in rows if one["shift"] == "none"]
    found: dict[str, list[str]] = {"helps": [], "hurts": []}
    for one, row in rows:
        gap = paired_difference(row["scores"][FALLING_BACK], row["scores"][ALONE])
        if gap.low > 0 or gap.high < 0:
            words = f"{row['method']}, {one['words']} ({gap.text('{:+.3f}')})"
            found["helps" if gap.low > 0 else "hurts"].append(words)
    said = [
        f"Fall-back {word} (the interval leaves out 0): {plain('; '.join(each)) or 'nowhere'}."
        for word, each in found.items()
    ]
    return [f"False alarms on fresh episodes: {plain(', '.join(fresh)) or 'not run'}.", *said]
