"""One picture of all methods: what they lose against the full policy, over FLOPs and over measured milliseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from blockcache.compare.methods import Method, method_named
from blockcache.files import PathLike
from blockcache.measure.statistics import LOSSLESS, Estimate
from blockcache.palette import drawn
from blockcache.report.figures import log_ticks, new_figure, save_figure
from blockcache.results.rollouts import BASELINE
from blockcache_lab.studies.suite_results import Collection

# family -> where the labels of its points stand, so that equal costs leave them readable; others are not in the picture
_LABELS = {
    "BAC": (6, 5),
    "Uniform": (6, -11),
    "DDIM-N": (-6, 5),
    "DDPM-N": (6, 5),
    "BAC on DDIM": (-6, -11),
    "TeaCache": (-6, 5),
    "DPM-Solver++-N": (-6, 5),
    "Action costs": (6, -11),
    "tuned": (6, 5),
}


@dataclass(frozen=True)
class Point:
    method: Method
    gflop: float
    ms: float | None
    difference: Estimate


def points(collection: Collection) -> list[Point]:
    """What is in the picture: variants by metric, objective or n are left to the tables."""
    methods = {name: method_named(name) for name in collection.rows}
    variants = {
        family: [method.variant for method in methods.values() if method.family == family] for family in _LABELS
    }
    found = []
    for name, row in collection.rows.items():
        method, difference = methods[name], row.difference
        own = variants.get(method.family, ())
        usual = method.variant == max(own, key=own.count, default=None)
        if usual and difference is not None and math.isfinite(difference.low):
            ms = collection.timings.ms(name) if collection.timings else None
            found.append(Point(method, row.method.flops / 1e9, ms, difference))
    return sorted(found, key=lambda point: point.gflop)


def plot_tradeoff(collection: Collection, path: PathLike) -> None:
    """Left over FLOPs, right over milliseconds where there are timings; the full policy is the line at 0."""
    shown, full = points(collection), collection.full
    full_ms = collection.timings.ms(BASELINE) if collection.timings else None
    panels: list[tuple[str, list[tuple[Point, float]], float]] = [
        ("GFLOP per action chunk (by formula)", [(point, point.gflop) for point in shown], full.method.flops / 1e9)
    ]
    if full_ms is not None:
        timed = [(point, point.ms) for point in shown if point.ms is not None]
        panels.append(("milliseconds per action chunk (measured, one CPU thread)", timed, full_ms))
    figure = new_figure(6.6 * len(panels), 6.2)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for panel, (title, placed, reference) in zip(axes[0], panels, strict=True):
        _draw(panel, title, placed, reference)
    axes[0][0].set_ylabel("score: paired difference to full precision")
    if full.score is not None:
        mean = full.score.mean
        right = axes[0][-1].secondary_yaxis("right", functions=(lambda y: y + mean, lambda y: y - mean))
        right.set_ylabel(f"score (full precision: {mean:.3f}, n = {full.score.n})")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4 * len(panels), frameon=False, fontsize=9)
    save_figure(figure, path)


def _draw(axes: Any, title: str, placed: list[tuple[Point, float]], reference: float) -> None:
    """One panel. Points of fewer episodes than others are hollow."""
    from matplotlib.colors import to_rgba

    most = max((point.difference.n for point, _ in placed), default=0)

    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(LOSSLESS, color="black", linewidth=0.8, linestyle=":")
    axes.plot([reference], [0], marker="*", markersize=13, color="black", linestyle="none", label="full precision")
    for family, offset in _LABELS.items():
        own = sorted(((x, point) for point, x in placed if point.method.family == family), key=lambda pair: pair[0])
        if not own:
            continue
        colour, marker = drawn(*own[0][1].method.look)
        x, y = [place for place, _ in own], [point.difference.mean for _, point in own]
        below = [point.difference.mean - point.difference.low for _, point in own]
        above = [point.difference.high - point.difference.mean for _, point in own]
        axes.errorbar(
            x,
            y,
            yerr=[below, above],
            color=colour,
            ecolor=to_rgba(colour, 0.5),
            marker=marker,
            markersize=5.5,
            linewidth=1.1,
            elinewidth=1,
            capsize=2.5,
            label=family,
        )
        for place, point in own:
            if point.difference.n < most:
                axes.plot(
                    place,
                    point.difference.mean,
                    marker,
                    color=colour,
                    markerfacecolor="white",
                    markersize=5.5,
                    zorder=9,
                )
            axes.annotate(
                point.method.setting,
                (place, point.difference.mean),
                xytext=offset,
                ha="left" if offset[0] > 0 else "right",
                textcoords="offset points",
                fontsize=7.5,
                color=colour,
            )
    axes.annotate(
        "lossless needs an interval above this line",
        (0.01, LOSSLESS),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        fontsize=7,
    )
    axes.set_xscale("log")
    values = [reference, *(x for _, x in placed)]
    axes.set_xlim(min(values) / 1.4, max(values) * 1.3)
    ticks = log_ticks(values)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(title)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
