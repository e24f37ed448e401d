"""The picture of growth in docs/generated/performance.md. Knows nothing of what is written around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockcache.files import PathLike
from blockcache.palette import COLOURS
from blockcache.report.figures import new_figure, save_figure

BENCH_PICTURE, GROWTH_PICTURE = "performance-bench.png", "performance-growth.png"


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
        axes.scatter(x, y, color=COLOURS["orange"], zorder=2)
        axes.set_xlabel(label)
        axes.set_title(f"{start:.1f} ms + {slope:.2f} ms x {'K' if name == 'steps' else 'S'}", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(0, y.max() * 1.1)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("ms per chunk (onnx, 1 thread)")
    save_figure(figure, path)
