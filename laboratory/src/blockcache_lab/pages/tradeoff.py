"""One picture of all methods: what they lose against the full policy, over FLOPs and over measured milliseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from blockcache.compare.methods import ActionBudget, FewerSteps, Solved, TeaCache, parse_method
from blockcache.files import PathLike
from blockcache.measure.statistics import LOSSLESS, Estimate
from blockcache.report.figures import log_ticks, new_figure, save_figure
from blockcache.report.suites import Collection, family
from blockcache.results.rollouts import BASELINE

# kind -> colour, marker, and where the labels of its points stand, so that equal costs leave them readable
_KINDS = {
    "BAC": ("#e45756", "o", (6, 5)),
    "Uniform": ("#8a8a8a", "s", (6, -11)),
    "DDIM-N": ("#4c78a8", "^", (-6, 5)),
    "DDPM-N": ("#b279a2", "v", (6, 5)),
    "BAC on DDIM": ("#f58518", "D", (-6, -11)),
    "TeaCache": ("#54a24b", "P", (-6, 5)),
    "DPM-Solver++-N": ("#4c78a8", "^", (-6, 5)),
    "Action costs": ("#54a24b", "D", (6, -11)),
    "tuned": ("#000000", "X", (6, 5)),
}


@dataclass(frozen=True)
class Point:
    kind: str
    name: str  # what sets it apart from others of its kind
    gflop: float
    ms: float | None
    difference: Estimate


def points(collection: Collection) -> list[Point]:
    """What is in the picture: variants by metric, objective or n are left to the tables."""
    found, union = [], _usual_union(collection)
    for method, row in collection.rows.items():
        placed = _place(method, union)
        if placed is not None and row.difference is not None and math.isfinite(row.difference.low):
            ms = collection.timings.ms(method) if collection.timings else None
            found.append(Point(*placed, row.method.flops / 1e9, ms, row.difference))
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
    for kind, (colour, marker, offset) in _KINDS.items():
        own = sorted(((x, point) for point, x in placed if point.kind == kind), key=lambda pair: pair[0])
        if not own:
            continue
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
            label=kind,
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
                point.name,
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


def _usual_union(collection: Collection) -> int:
    """The n that most BAC schedules have under the policy's own sampler: where it varies, the others are variants."""
    methods = map(parse_method, collection.rows)
    found = [item.reuse for item in methods if item.sampler is None and isinstance(item.reuse, Solved)]
    unions = [reuse.union for reuse in found if reuse.method == "bac"]
    return max(unions, key=unions.count, default=Solved("bac").union)


def _place(name: str, union: int) -> tuple[str, str] | None:
    """The kind and the point's own name; None for what is not in the picture."""
    method, kind = parse_method(name), family(name)
    sampler, reuse = method.sampler, method.reuse
    if kind not in _KINDS:
        return None
    if isinstance(reuse, Solved):
        usual = Solved(reuse.method, reuse.updates, union=union if sampler is None else 3)
        plain = reuse == usual or (reuse.method == "uniform" and not reuse.last)
        return (kind, f"S={reuse.updates}") if plain else None
    if isinstance(reuse, TeaCache):
        return kind, f"{reuse.threshold:g}"
    if isinstance(reuse, ActionBudget):
        return kind, f"{reuse.updates if reuse.budget is None else reuse.budget:g}"
    return kind, f"N={sampler.steps}" if isinstance(sampler, FewerSteps) else ""
