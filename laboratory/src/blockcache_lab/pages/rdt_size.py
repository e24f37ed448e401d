"""docs/generated/rdt-size.md, from the JSON that `blockcache paper rdt-size` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockcache.files import Count, Fields, Format, list_of
from blockcache.report.document import Document, Paragraph, plain, table_of

_FIGURES = dict.fromkeys(("seconds", "speedup", "gflop", "max_difference", "largest_action"), float)
FORMAT = Format(
    "blockcache.rdt-size",
    "file of RDT at its size",
    {
        "sizes": dict,
        "machine": dict,
        "threads": Count,
        "weights_mb": float,
        "peak_mb": float,
        "rows": list_of(Fields({"steps": Count, "engine": str, "repeats": Count, "command": str, **_FIGURES})),
    },
    optional=("made_by",),
)
_COLUMNS = {
    "steps": ("steps", "{}"),
    "engine": ("engine", "{}"),
    "rounds": ("repeats", "{}"),
    "TFLOP": ("tflop", "{:.2f}"),
    "seconds": ("seconds", "{:.1f}"),
    "x plain": ("speedup", "{:.2f}"),
    "largest difference": ("max_difference", "{:.1e}"),
}


def joined(before: Mapping[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """A measurement with what an earlier one of the same sizes and threads says of other numbers of steps."""
    if before is None or any(before[name] != now[name] for name in ("sizes", "threads")):
        return now
    steps = {row["steps"] for row in now["rows"]}
    kept = [row for row in before["rows"] if row["steps"] not in steps]
    return {
        **now,
        "peak_mb": max(before["peak_mb"], now["peak_mb"]),
        "rows": sorted([*kept, *now["rows"]], key=lambda row: row["steps"]),
    }


def page(results: Mapping[str, Any]) -> Document:
    """The whole page."""
    sizes, weights, peak = results["sizes"], results["weights_mb"], results["peak_mb"]
    shown = ", ".join(f"{plain(str(name))} {plain(str(value))}" for name, value in sizes.items())
    load = results["machine"].get("load_average")
    busy = (
        f", while others worked too (load average {load[0]:.1f})" if load and load[0] > results["threads"] + 1 else ""
    )
    commands = dict.fromkeys(row["command"] for row in results["rows"])
    rows = [{**row, "tflop": row["gflop"] / 1e3} for row in results["rows"]]
    largest = max((row["largest_action"] for row in rows), default=0.0)
    return Document(
        "RDT at its real size",
        (
            Paragraph(
                f"Made by {' and '.join(f'`{command}`' for command in commands)} on {plain(str(results['machine'].get('processor')))}: random weights, batch 1, "
                f"float32, {results['threads']} threads of torch, medians of interleaved rounds without a warm-up{busy}. "
                f"Sizes: {shown}."
            ),
            Paragraph(
                "Language and image tokens do not change within one generation. The plain policy, as the public code, projects them to "
                "keys and values in every layer at every step; the engines do it once. Nothing is approximated: no block is skipped, and "
                f"the actions (up to {largest:.2g}) are those of the plain policy but for rounding."
            ),
            table_of(_COLUMNS, rows),
            Paragraph(
                f"Weights take {weights / 1e3:.2f} GB. The whole process, with Python and torch, had {peak / 1e3:.2f} GB at most: "
                f"{peak / weights:.2f} x the weights. They are in memory once, and the loop engine multiplies by the policy's own."
            ),
        ),
    )
