"""The pictures of docs/generated/performance.md and of `bench --plot`. Knows nothing of what is written around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockcache.files import PathLike
from blockcache.report.figures import new_figure, save_figure
from blockcache.results.rollouts import EAGER

BENCH_PICTURE, GROWTH_PICTURE = "performance-bench.png", "performance-growth.png"
_INK = {EAGER: "#8a8a8a", "patched": "#4c78a8", "loop": "#54a24b", "onnx": "#e45756"}


def plot_bench(bench: Mapping[str, Any], path: PathLike) -> None:
    """Milliseconds per chunk, one bar a candidate, on a logarithmic axis."""
    rows = [row for row in bench["rows"] if not row["saving"]]
    figure = new_figure(9, 0.42 * len(rows) + 1.2)
    axes = figure.subplots()
    places = range(len(rows), 0, -1)
    axes.barh(
        places, [row["p50_ms"] for row in rows], color=[_INK.get(row["engine"], "#000000") for row in rows], height=0.7
    )
    for place, row in zip(places, rows, strict=True):
        axes.text(
            row["p50_ms"] * 1.04, place, f"{row['p50_ms']:.0f} ms, {row['speedup']:.1f}x", va="center", fontsize=8
        )
    axes.set_yticks(list(places), [row["name"] for row in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(min(row["p50_ms"] for row in rows) / 3, max(row["p50_ms"] for row in rows) * 3)
    axes.set_xlabel("milliseconds per action chunk (median, logarithmic)")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def plot_growth(growth: Mapping[str, Any], path: PathLike) -> None:
    """Cost against steps and against updates, each with the straight line through its points."""
    import numpy as np

    figure = new_figure(9, 3.2)
    both = figure.subplots(1, 2)
    labels = {"steps": "denoising steps K (a tenth of them updates)", "updates": "update steps per block S (K = 100)"}
    for axes, (name, label) in zip(both, labels.items(), strict=True):
        x, y = (np.array([point[key] for point in growth[name]]) for key in ("x", "ms"))
        slope, start = np.polyfit(x, y, 1)
        ends = np.array([0, x.max()])
        axes.plot(ends, start + slope * ends, color="#bbbbbb", zorder=1)
        axes.scatter(x, y, color=_INK["onnx"], zorder=2)
        axes.set_xlabel(label)
        axes.set_title(f"{start:.1f} ms + {slope:.2f} ms x {'K' if name == 'steps' else 'S'}", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(0, y.max() * 1.1)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("ms per chunk (onnx, 1 thread)")
    save_figure(figure, path)
