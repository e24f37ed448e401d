"""docs/generated/caching-error.md, from the JSON that `blockcache paper errors` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockcache.files import Count, Fields, Format, list_of
from blockcache.report.document import Document, Paragraph, Section, plain, table, table_of

_ERRORS = dict.fromkeys(("action_error", "first_action_p95"), float)
_PARTS = dict.fromkeys(("gflop", "caching_error", "update_induced", "reuse_induced"), float)
_ROW = Fields({"method": str, "updates": Count, "per_block": dict[str, float], **_PARTS, **_ERRORS})
FORMAT = Format(
    "blockcache.caching",
    "file of caching errors",
    {
        "command": str,
        "machine": dict,
        "threads": Count,
        "calibration": Fields({"generations": Count, "seconds": float}),
        "observations": Count,
        "noise_floor": Fields(_ERRORS),
        "rows": list_of(_ROW),
    },
    optional=("made_by",),
)
_COLUMNS = {
    "method": ("method", "{}"),
    "S": ("updates", "{}"),
    "GFLOP": ("gflop", "{:.2f}"),
    "caching error": ("caching_error", "{:.3f}"),
    "update-induced": ("update_induced", "{:.3f}"),
    "reuse-induced": ("reuse_induced", "{:.3f}"),
    "action error": ("action_error", "{:.3f}"),
    "first action P95": ("first_action_p95", "{:.3f}"),
}


def page(results: Mapping[str, Any]) -> Document:
    """The whole page."""
    rows, floor, calibration = results["rows"], results["noise_floor"], results["calibration"]
    middle = [row for row in rows if row["updates"] == 10]
    command = results["command"].replace("blockcache errors", "blockcache paper errors")  # as files from before have it
    blocks = list(middle[0]["per_block"]) if middle else []
    return Document(
        "Caching error and action error",
        (
            Paragraph(
                f"Made by `{command}`: calibrated on {calibration['generations']} generations in "
                f"{calibration['seconds']:.0f} s (torch threads: {results['threads']}), compared on {results['observations']} other "
                "observations. All methods see the same noise. BAC with n = 5."
            ),
            Paragraph(
                "*Caching error*: `|b^ - b| / |b|` of a block's residual, mean over blocks, steps and samples; *update-induced* at the\n"
                "blocks' own update steps, *reuse-induced* elsewhere. *Action error*: mean absolute difference to the full policy over\n"
                "the executed slice, in normalised units, and the 95th percentile of the first action's. Two full runs with different\n"
                f"noise differ by {floor['action_error']:.3f} (first action, 95th percentile: {floor['first_action_p95']:.3f})."
            ),
            table_of(_COLUMNS, rows),
            Section(
                "Per block at S = 10",
                (table(["block", *(row["method"] for row in middle)], [_block(name, middle) for name in blocks]),),
            ),
        ),
    )


def _block(name: str, rows: list[Mapping[str, Any]]) -> list[str]:
    return [plain(name), *(f"{row['per_block'][name]:.3f}" for row in rows)]
