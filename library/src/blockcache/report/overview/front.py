"""What every method loses against the milliseconds that it takes, how far its actions are off, and the milliseconds alone.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import LOSSLESS
from blockcache.palette import Colour, Marker
from blockcache.report.bench import bar_chart, bench_chart
from blockcache.report.chart import Axis, Bars, Panel, Rule, Series
from blockcache.report.document import Block, Chart, Section, code, missing, plain, table
from blockcache.report.methods import DIFFERENCE, SCORE, cells
from blockcache.report.overview.answer import Answer
from blockcache.report.overview.sources import Source, Sources
from blockcache.report.tuning import MS, tuning_chart
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache.results.timings import Timings

LOWEST = -0.25
"""Methods that lose more are drawn at the lower edge, their loss in the tooltip: the others lie close together."""


def front_section(sources: Sources, answer: Answer | None) -> Section:
    """Rollouts against time, and every tuning's points."""
    blocks: list[Block] = []
    timed = sources.timed()
    if sources.rows:
        blocks.append(_methods(sources, timed, answer))
        if timed is None:
            blocks.append(missing("milliseconds", f"blockcache paper timing {sources.typed} -o DIRECTORY"))
    blocks += [
        tuning_chart(one.value, f"tuning-{number}", source=f"From {code(one.path)}.")
        for number, one in enumerate(sources.tunings, 1)
    ]
    if not sources.rows:
        blocks.append(missing("rollouts", f"blockcache eval {sources.typed} -o results.json"))
    if not sources.tunings:
        blocks.append(missing("a tuning", f"blockcache tune {sources.typed} --loss 0.03 -o tuned"))
    return Section("The front", tuple(blocks))


def _methods(sources: Sources, timed: Timings | None, answer: Answer | None) -> Chart:
    """Against milliseconds, or against FLOPs where nothing was timed."""
    rows = sources.rows
    # energy beyond spread by method: what tells best of what is lost, without a rollout
    shifts: Mapping[str, float] = next((one.value.shifts for one in sources.brought if one.value.shifts), {})
    if timed is None:
        costs = {name: row.method.flops / 1e9 for name, row in rows.items()}
        axis = Axis("GFLOP per chunk", log=min(costs.values()) > 0)  # where FLOPs are not known they are 0
        unit, form, what = "GFLOP", "{:.3f}", "Loss against FLOPs"
    else:
        costs = {name: ms for name in rows if (ms := timed.ms(name)) is not None}
        axis, unit, form, what = MS, "ms", "{:.2f}", "Loss and distance against time"
    panels = [Panel(axis, Axis("score - full"), _losses(sources, costs, answer), "Score", _ZERO)]
    known = {name: cost for name, cost in costs.items() if name in shifts}
    if known:
        distance = Axis("energy beyond spread", log=min(shifts.values()) > 0)
        series = _grouped(known, {name: shifts[name] for name in known}, answer, {})
        panels.append(Panel(axis, distance, series, "Distance of the actions"))
    over = {} if timed is None else {name: timed.over(name, PLAIN) for name in rows}
    figures = [
        {
            **cells(row),
            "method": plain(method_named(name).label),
            unit: form.format(costs[name]) if name in costs else "",
            "over plain": f"{over[name]:.1f}x" if over.get(name) is not None else "",
            "n": str(row.count or ""),
            "energy beyond spread": f"{shifts[name]:.4f}" if name in shifts else "",
        }
        for name, row in rows.items()
    ]
    columns = ["method", unit, *(["over plain"] if timed else []), "n", SCORE, DIFFERENCE, "lossless"]
    return Chart(
        "front",
        what,
        f"{len(costs)} methods. {_seen(sources, costs, answer, unit)}",
        tuple(panels),
        table([*columns, *(["energy beyond spread"] if known else [])], figures),
        f"Left is {'faster' if timed else 'cheaper'}. *Score*: paired difference to the full policy with its 95 % interval, higher is better; "
        f"what loses more than {-LOWEST:g} stands at the edge."
        + (" *Distance*: how far the actions are from the policy's own as distributions, lower is better." if known else ""),
        columns=2 if timed else 1,
    )  # fmt: skip


_ZERO = (Rule("y", 0.0, ""), Rule("y", LOSSLESS, f"lossless above {LOSSLESS:g}"))


def _seen(sources: Sources, costs: Mapping[str, float], answer: Answer | None, unit: str) -> str:
    fastest = min(costs, key=lambda name: costs[name], default=None)
    said = "" if fastest is None else f"The least has {method_named(fastest).label} with {costs[fastest]:.3g} {unit}."
    if answer is not None and answer.name in costs and (d := sources.rows[answer.name].difference):
        label = method_named(answer.name).label
        said += f" Chosen: {label} with {costs[answer.name]:.3g} {unit} and {d.text('{:+.3f}')}."
    return said


def _losses(sources: Sources, costs: Mapping[str, float], answer: Answer | None) -> tuple[Series, ...]:
    differences = {name: d for name, row in sources.rows.items() if (d := row.difference) is not None and name in costs}
    means = {name: max(LOWEST, value.mean) for name, value in differences.items()}
    if BASELINE in costs:
        means[BASELINE] = 0.0
    known = {name: d for name, d in differences.items() if math.isfinite(d.low)}  # of a single rollout there is none
    clipped = {name: (max(LOWEST, d.low), max(LOWEST, d.high)) for name, d in known.items()}
    notes = {name: f"difference {d.text('{:+.3f}')}, n = {d.n}" for name, d in differences.items()}
    return _grouped(costs, means, answer, notes, clipped)


def _grouped(
    costs: Mapping[str, float],
    values: Mapping[str, float],
    answer: Answer | None,
    notes: Mapping[str, str],
    intervals: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[Series, ...]:
    """One series for each kind of method, the chosen one once more on top."""

    def series(title: str, names: list[str], colour: Colour, marker: Marker, **style: Any) -> Series:
        said = tuple("; ".join(filter(None, (method_named(name).label, notes.get(name)))) for name in names)
        x, y = tuple(costs[name] for name in names), tuple(values[name] for name in names)
        return Series(title, x, y, colour, marker, notes=said, **style)

    kinds: dict[str, list[str]] = {}
    for name in sorted((name for name in values if name in costs), key=lambda name: costs[name]):
        kinds.setdefault(method_named(name).kind, []).append(name)
    made = []
    for kind, names in sorted(kinds.items(), key=lambda item: method_named(item[1][0]).rank):
        low, high = (), ()
        if intervals:
            low, high = zip(*(intervals.get(name, (values[name], values[name])) for name in names), strict=True)
        made.append(series(kind, names, *method_named(names[0]).look, low=low, high=high))
    if answer is not None and answer.name in costs and answer.name in values:
        made.append(series("chosen", [answer.name], "orange", "star", labels=("chosen",), large=True))
    return tuple(made)


def latency_section(sources: Sources) -> Section:
    blocks: list[Block] = [_timings(number, one) for number, one in enumerate(sources.timings, 1)]
    blocks += [
        bench_chart(one.value, f"bench-{number}", f"From {code(one.path)}.")
        for number, one in enumerate(sources.benchmarks, 1)
    ]
    if not sources.benchmarks:
        blocks.append(missing("engines beside plain torch", f"blockcache bench {sources.typed} --json bench.json"))
    return Section("Milliseconds", tuple(blocks))


def _timings(number: int, source: Source[Timings]) -> Chart:
    timed = source.value
    ms = {name: latency.p50 * 1e3 for name, latency in timed.seconds.items()}
    names = sorted(ms, key=lambda name: ms[name])
    times = {name: "" if (over := timed.over(name, PLAIN)) is None else f"{over:.1f}x" for name in names}
    colours = tuple(method_named(name).look[0] if name != PLAIN else "grey" for name in names)
    words = tuple(PLAIN if name == PLAIN else method_named(name).label for name in names)
    beside = {name: f", {over} the plain policy" * bool(over) for name, over in times.items()}
    notes = tuple(f"{ms[name]:.2f} ms (p50){beside[name]}" for name in names)
    rows = [
        [plain(word), f"{ms[name]:.2f}", f"{1e3 * timed.seconds[name].percentile(95):.2f}", times[name]]
        for word, name in zip(words, names, strict=True)
    ]
    return bar_chart(
        f"timings-{number}",
        "One chunk by method",
        words,
        Bars("ms", tuple(ms[name] for name in names), colours, notes),
        table(["method", "p50 ms", "p95 ms", "over the plain policy"], rows),
        f"{plain(timed.setting).capitalize()}; {plain(timed.machine['processor'])}. Colours as in the front. From {code(source.path)}.",
    )
