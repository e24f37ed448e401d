"""Pictures of the pages: what methods lose against what they cost, and how an engine's time grows. Drawn as charts are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from blockcache.compare.methods import Method, method_named
from blockcache.files import PathLike
from blockcache.measure.statistics import LOSSLESS, Estimate
from blockcache.report.chart import Axis, Panel, Rule, Series
from blockcache.report.drawing import draw_panels, save_figure
from blockcache.results.rollouts import BASELINE
from blockcache_lab.studies.suite_results import Collection

LOSS, MILLISECONDS = (
    "score: paired difference to full precision",
    "milliseconds per action chunk (measured, one CPU thread)",
)
RULES = (Rule("y", 0.0, ""), Rule("y", LOSSLESS, f"lossless needs an interval above {LOSSLESS:g}"))
# in the picture of a trade-off; others are left to the tables
_FAMILIES = ("BAC", "Uniform", "DDIM-N", "DDPM-N", "BAC on DDIM", "TeaCache", "DPM-Solver++-N", "Action costs", "tuned")


class Mark(NamedTuple):
    """A method's place in a picture, and the ends of its interval if it has one."""

    method: Method
    x: float
    y: float
    label: str
    low: float | None = None
    high: float | None = None


def loss_mark(method: Method, cost: float, difference: Estimate, label: str, lowest: float = -math.inf) -> Mark:
    """A loss against a cost; one below `lowest` stands there without its interval, its value beside its label."""
    if difference.mean < lowest:
        return Mark(method, cost, lowest, f"{label} ({difference.mean:+.2f})")
    return Mark(method, cost, difference.mean, label, difference.low, difference.high)


def series_of(kinds: Mapping[str, Sequence[Mark]], *, line: bool = False) -> tuple[Series, ...]:
    """One for each kind of method, by its name; in the colour and shape of its first method."""
    return tuple(
        Series(
            name,
            tuple(mark.x for mark in marks),
            tuple(mark.y for mark in marks),
            *marks[0].method.look,
            line=line,
            low=tuple(mark.y if mark.low is None else mark.low for mark in marks),
            high=tuple(mark.y if mark.high is None else mark.high for mark in marks),
            labels=tuple(mark.label for mark in marks),
        )
        for name, marks in kinds.items()
        if marks
    )


def by_kind(marks: Iterable[Mark]) -> dict[str, list[Mark]]:
    """Marks by the kinds of method that legends tell apart, in the order of legends."""
    found: dict[str, list[Mark]] = {}
    for mark in sorted(marks, key=lambda mark: mark.method.rank):
        found.setdefault(mark.method.kind, []).append(mark)
    return found


def full_precision(cost: float | None) -> tuple[Series, ...]:
    """The full policy's own place, if its cost is known."""
    return () if cost is None else (Series("full precision", (cost,), (0.0,), "ink", "star", hollow=True, large=True),)


class Point(NamedTuple):
    """A method in the picture of a trade-off."""

    method: Method
    gflop: float
    ms: float | None
    difference: Estimate


def points(collection: Collection) -> list[Point]:
    """What is in the picture: variants by metric, objective or n are left to the tables."""
    methods = {name: method_named(name) for name in collection.rows}
    variants = {
        family: [method.facts.variant for method in methods.values() if method.family == family] for family in _FAMILIES
    }
    found = []
    for name, row in collection.rows.items():
        method, difference = methods[name], row.difference
        own = variants.get(method.family, ())
        usual = method.facts.variant == max(own, key=own.count, default=None)
        if usual and difference is not None and math.isfinite(difference.low):
            found.append(Point(method, row.method.flops / 1e9, collection.ms(name), difference))
    return sorted(found, key=lambda point: point.gflop)


def plot_tradeoff(collection: Collection, path: PathLike) -> None:
    """Left over FLOPs, right over milliseconds where there are timings; the full policy is the line at 0.

    Args:
        collection: The suites of one policy.
        path: Of the picture; its ending says the format.
    """
    shown, full, full_ms = points(collection), collection.full, collection.ms(BASELINE)
    costs = [(point, point.gflop) for point in shown]
    panels = [_tradeoff("GFLOP per action chunk (by formula)", costs, full.method.flops / 1e9)]
    if full_ms is not None:
        timed = [(point, point.ms) for point in shown if point.ms is not None]
        panels.append(_tradeoff(MILLISECONDS, timed, full_ms))
    figure = draw_panels(panels, len(panels), 6.6, 6.2)
    if full.score is not None:
        mean = full.score.mean
        axes = figure.axes[len(panels) - 1]
        right = axes.secondary_yaxis("right", functions=(lambda y: y + mean, lambda y: y - mean))
        right.tick_params(labelsize=7)
        right.set_ylabel(f"score (full precision: {mean:.3f}, n = {full.score.n})", fontsize=8)
    save_figure(figure, path)


def _tradeoff(title: str, costs: Sequence[tuple[Point, float]], full: float) -> Panel:
    """Methods of a family are joined; those of fewer episodes than others are hollow."""
    most = max((point.difference.n for point, _ in costs), default=0)
    families: dict[str, list[Mark]] = {name: [] for name in _FAMILIES}
    hollow: dict[str, list[Mark]] = {}
    for point, cost in sorted(costs, key=lambda pair: pair[1]):
        mark = loss_mark(point.method, cost, point.difference, point.method.facts.setting)
        families[point.method.family].append(mark)
        if point.difference.n < most:
            hollow.setdefault(point.method.family, []).append(mark)
    few = (
        Series("", tuple(mark.x for mark in marks), tuple(mark.y for mark in marks), *marks[0].method.look, hollow=True)
        for marks in hollow.values()
    )
    return Panel(
        Axis(title, log=True), Axis(LOSS), (*full_precision(full), *series_of(families, line=True), *few), rules=RULES
    )
