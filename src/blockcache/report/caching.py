"""docs/caching-error.md, from the JSON that `blockcache errors` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockcache.report.markdown import table


def page(results: Mapping[str, Any]) -> str:
    rows, floor, calibration = results["rows"], results["noise_floor"], results["calibration"]
    middle = [row for row in rows if row["updates"] == 10]
    blocks = list(middle[0]["per_block"]) if middle else []
    return "\n".join(
        [
            "# Caching error and action error",
            "",
            f"Made by `{results['command']}`: calibrated on {calibration['generations']} generations in "
            f"{calibration['seconds']:.0f} s (torch threads: {results['threads']}), compared on {results['observations']} other "
            "observations. All methods see the same noise. BAC with n = 5.",
            "",
            "*Caching error*: `|b^ - b| / |b|` of a block's residual, mean over blocks, steps and samples; *update-induced* at the",
            "blocks' own update steps, *reuse-induced* elsewhere. *Action error*: mean absolute difference to the full policy over",
            "the executed slice, in normalised units, and the 95th percentile of the first action's. Two full runs with different",
            f"noise differ by {floor['action_error']:.3f} (first action, 95th percentile: {floor['first_action_p95']:.3f}).",
            "",
            table(
                [
                    "method",
                    "S",
                    "GFLOP",
                    "caching error",
                    "update-induced",
                    "reuse-induced",
                    "action error",
                    "first action P95",
                ],
                [_row(row) for row in rows],
            ),
            "",
            "## Per block at S = 10",
            "",
            table(["block", *(row["method"] for row in middle)], [_block(name, middle) for name in blocks]),
            "",
        ]
    )


def _row(row: Mapping[str, Any]) -> list[str]:
    return [
        row["method"],
        str(row["updates"]),
        f"{row['gflop']:.2f}",
        f"{row['caching_error']:.3f}",
        f"{row['update_induced']:.3f}",
        f"{row['reuse_induced']:.3f}",
        f"{row['action_error']:.3f}",
        f"{row['first_action_p95']:.3f}",
    ]


def _block(name: str, rows: list[Mapping[str, Any]]) -> list[str]:
    return [name, *(f"{row['per_block'][name]:.3f}" for row in rows)]
