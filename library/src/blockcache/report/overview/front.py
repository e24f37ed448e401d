"""What every method loses against the milliseconds that it takes, how far its actions are off, and the milliseconds alone.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import LOSSLESS
from blockcache.report.bench import bar_chart, bench_chart
from blockcache.report.chart import Axis, Bars, Panel, Rule, Series
from blockcache.report.document import Block, Chart, Section, code, missing, plain, table
from blockcache.report.methods import estimate, lossless
from blockcache.report.overview.answer import Answer
from blockcache.report.overview.sources import Source, Sources
from blockcache.report.tuning import MS, tuning_chart
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache.results.timings import Timings

LOWEST = -0.25
"""What loses more stands at the lower edge, with its loss in the words: the interesting ones lie close together."""


def front_section(sources: Sources, answer: Answer | None) -> Section:
    """Rollouts against time, and every tuning's points."""
    blocks: list[Block] = []
    timed = sources.timed()
    if sources.rows and timed is not None:
        blocks.append(_methods(sources, timed, answer))
    elif sources.rows:
        blocks += [
            _by_flops(sources, answer),
            missing("milliseconds", f"blockcache paper timing {sources.typed} -o DIRECTORY"),
        ]
    blocks += [
        tuning_chart(one.value, f"tuning-{number}", source=f"From {code(one.path)}.")
        for number, one in enumerate(sources.tunings, 1)
    ]
    if not sources.rows:
        blocks.append(missing("rollouts", f"blockcache eval {sources.typed} -o results.json"))
    if not sources.tunings:
        blocks.append(missing("a tuning", f"blockcache tune {sources.typed} --loss 0.03 -o tuned"))
    return Section("The front", tuple(blocks))


def _methods(sources: Sources, timed: Timings, answer: Answer | None) -> Chart:
    costs = {name: ms for name in sources.rows if (ms := timed.ms(name)) is not None}
    loss = Panel(MS, Axis("score - full"), _losses(sources, costs, answer), "Score", _ZERO)
    panels, shifts = [loss], _shifts(sources)
    known = {name: ms for name, ms in costs.items() if name in shifts}
    if known:
        series = _grouped(known, {name: shifts[name] for name in known}, answer, {})
        panels.append(Panel(MS, Axis("energy beyond spread", log=_positive(shifts)), series, "Distance of the actions"))
    rows = [
        [
            plain(method_named(name).label),
            f"{costs[name]:.2f}" if name in costs else "",
            f"{over:.1f}x" if (over := timed.over(name, PLAIN)) is not None else "",
            str(row.score.n) if row.score else "",
            estimate(row.score, "{:.3f}"),
            estimate(row.difference, "{:+.3f}"),
            lossless(row.difference),
            f"{shifts[name]:.4f}" if name in shifts else "",
        ]
        for name, row in sources.rows.items()
    ]
    columns = [
        "method",
        "ms",
        "over plain",
        "n",
        "score, 95 %",
        "difference to full, 95 %",
        "lossless",
        "energy beyond spread",
    ]
    return Chart(
        "front",
        "Loss and distance against time",
        f"{len(costs)} methods. {_seen(sources, costs, answer)}",
        tuple(panels),
        table(columns, rows),
        "Left is faster. *Score*: paired difference to the full policy with its 95 % interval, higher is better; what loses more than "
        f"{-LOWEST:g} stands at the edge."
        + (" *Distance*: how far the actions are from the policy's own as distributions, lower is better." if known else ""),
        columns=2,
    )  # fmt: skip


_ZERO = (Rule("y", 0.0, ""), Rule("y", LOSSLESS, f"lossless above {LOSSLESS:g}"))


def _seen(sources: Sources, costs: Mapping[str, float], answer: Answer | None, unit: str = "ms") -> str:
    fastest = min(costs, key=lambda name: costs[name], default=None)
    said = "" if fastest is None else f"The least has {method_named(fastest).label} with {costs[fastest]:.3g} {unit}."
    if answer is not None and answer.name in costs and (d := sources.rows[answer.name].difference):
        said += (
            f" Chosen: {method_named(answer.name).label} with {costs[answer.name]:.3g} {unit} and {d.text('{:+.3f}')}."
        )
    return said


def _by_flops(sources: Sources, answer: Answer | None) -> Chart:
    costs = {name: row.method.flops / 1e9 for name, row in sources.rows.items()}
    axis = Axis("GFLOP per chunk", log=min(costs.values()) > 0)  # where FLOPs are not known they are 0
    rows = [
        [plain(method_named(name).label), f"{costs[name]:.3f}", estimate(row.score, "{:.3f}"), estimate(row.difference, "{:+.3f}"), lossless(row.difference)]
        for name, row in sources.rows.items()
    ]  # fmt: skip
    return Chart(
        "front",
        "Loss against FLOPs",
        f"{len(costs)} methods by GFLOP. {_seen(sources, costs, answer, 'GFLOP')}",
        (Panel(axis, Axis("score - full"), _losses(sources, costs, answer), "", _ZERO),),
        table(["method", "GFLOP", "score, 95 %", "difference to full, 95 %", "lossless"], rows),
        "Paired difference of the score to the full policy with its 95 % interval. Left is cheaper, higher is better.",
    )


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
    made = []
    kinds: dict[str, list[str]] = {}
    for name in sorted((name for name in values if name in costs), key=lambda name: costs[name]):
        kinds.setdefault(method_named(name).kind, []).append(name)
    for kind in sorted(kinds, key=lambda kind: method_named(kinds[kind][0]).rank):
        colour, marker = method_named(kinds[kind][0]).look
        names, ends = kinds[kind], intervals or {}
        spans = [ends.get(name, (values[name], values[name])) for name in names]
        made.append(
            Series(
                kind,
                tuple(costs[name] for name in names),
                tuple(values[name] for name in names),
                colour,
                marker,
                low=tuple(low for low, _ in spans) if ends else (),
                high=tuple(high for _, high in spans) if ends else (),
                notes=tuple("; ".join(filter(None, (method_named(name).label, notes.get(name)))) for name in names),
            )
        )
    if answer is not None and answer.name in costs and answer.name in values:
        x, y = costs[answer.name], values[answer.name]
        note = "; ".join(filter(None, (method_named(answer.name).label, notes.get(answer.name))))
        made.append(Series("chosen", (x,), (y,), "orange", "star", notes=(note,), labels=("chosen",), large=True))
    return tuple(made)


def _shifts(sources: Sources) -> dict[str, float]:
    """Energy beyond spread by method: what tells best of what is lost, without a rollout."""
    if not sources.distances:
        return {}
    return {name: found.distances.beyond_spread.mean for name, found in sources.distances[0].value.methods.items()}


def _positive(values: Mapping[str, float]) -> bool:
    return min(values.values(), default=0.0) > 0


def latency_section(sources: Sources) -> Section:
    blocks: list[Block] = [_timings(number, one) for number, one in enumerate(sources.timings, 1)]
    blocks += [
        bench_chart(one.value, f"bench-{number}", f"From {code(one.path)}.")
        for number, one in enumerate(sources.benches, 1)
    ]
    if not sources.benches:
        blocks.append(missing("engines beside plain torch", f"blockcache bench {sources.typed} --json bench.json"))
    return Section("Milliseconds", tuple(blocks))


def _timings(number: int, source: Source[Timings]) -> Chart:
    timed = source.value
    ms = {name: latency.p50 * 1e3 for name, latency in timed.seconds.items()}
    names = sorted(ms, key=lambda name: ms[name])
    over = {name: timed.over(name, PLAIN) for name in names}
    colours = tuple(method_named(name).look[0] if name != PLAIN else "grey" for name in names)
    words = tuple(PLAIN if name == PLAIN else method_named(name).label for name in names)
    notes = tuple(f"{ms[name]:.2f} ms (p50)" + _times(over[name]) for name in names)
    rows = [
        [plain(word), f"{ms[name]:.2f}", f"{1e3 * timed.seconds[name].percentile(95):.2f}", "" if over[name] is None else f"{over[name]:.1f}x"]
        for word, name in zip(words, names, strict=True)
    ]  # fmt: skip
    return bar_chart(
        f"timings-{number}",
        "One chunk by method",
        words,
        Bars("ms", tuple(ms[name] for name in names), colours, notes),
        table(["method", "p50 ms", "p95 ms", "over the plain policy"], rows),
        f"{plain(timed.setting).capitalize()}; {plain(timed.machine['processor'])}. Colours as in the front. From {code(source.path)}.",
    )


def _times(over: float | None) -> str:
    return "" if over is None else f", {over:.1f}x the plain policy"
