"""Rollouts on the clock: scores against how late chunks are, and what time did to them. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Sequence

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import Estimate
from blockcache.report.chart import Axis, Panel, Rule, Series
from blockcache.report.document import Block, Chart, Folded, Paragraph, Section, code, plain, table
from blockcache.report.evaluation import clock_blocks
from blockcache.report.methods import DIFFERENCE, SCORE, SUCCESS, cells, estimate
from blockcache.report.overview.sources import Source
from blockcache.results.rollouts import Results
from blockcache.results.summary import summarise


def mode_of(results: Results) -> str:
    """What a robot does while a chunk is made."""
    clock = results.setting["clock"]
    return f"{clock['mode']}{', told (RTC)' if clock.get('rtc') else ''}"


def clock_panels(found: Sequence[Results], title: str = "") -> tuple[Panel, ...]:
    """A panel for each mode: the score of each method against its latency; what was timed live is not drawn.

    Args:
        found: Rollouts on the clock, of one policy.
        title: Before each mode.
    """
    modes: dict[str, dict[str, dict[float, Estimate]]] = {}
    for results in found:
        times = results.setting["clock"]["latency"]
        for row in summarise(results):
            ms = times[row.method.name].get("median_ms")
            if ms is not None and row.score is not None:
                modes.setdefault(mode_of(results), {}).setdefault(row.method.name, {})[ms] = row.score
    return tuple(
        Panel(
            Axis("milliseconds until a chunk arrives"),
            Axis("score"),
            tuple(
                _line(name, points)
                for name, points in sorted(methods.items(), key=lambda item: (method_named(item[0]).rank, item[0]))
            ),
            f"{title}{mode}",
            (Rule("y", 0.0, ""), Rule("y", 1.0, "")),
        )
        for mode, methods in modes.items()
    )


def _line(name: str, points: dict[float, Estimate]) -> Series:
    method, places = method_named(name), sorted(points)
    said = tuple(f"{method.label}: {points[ms].text('{:.3f}')}, n = {points[ms].n}" for ms in places)
    means = tuple(points[ms].mean for ms in places)
    hollow = (method.kind, method.facts.updates) == ("BAC", 5)  # two of a kind have one look
    return Series(method.label, tuple(places), means, *method.look, line=True, notes=said, hollow=hollow)


def clock_section(sources: Sequence[Source[Results]]) -> list[Section]:
    """The section of a page; none where nothing ran on the clock."""
    if not sources:
        return []
    rows, folded = list[list[str]](), list[Folded]()
    for one in sources:
        mode, clock, summary = plain(mode_of(one.value)), one.value.setting["clock"], summarise(one.value)
        for row in summary:
            ms = clock["latency"][row.method.name].get("median_ms")
            scores = estimate(row.score, "{:.3f}"), estimate(row.success, "{:.2f}")
            label = plain(method_named(row.method.name).label)
            rows.append([mode, label, "live" if ms is None else f"{ms:.0f}", f"{clock['rate']:g}", *scores])
        closed = table(("method", "n", SCORE, DIFFERENCE, "success"), map(cells, summary))
        origin = Paragraph(f"From {code(one.path)}.")
        folded.append(Folded(f"{mode}, {plain(one.path)}", (closed, *clock_blocks(one.value), origin)))
    blocks: list[Block] = []
    if panels := clock_panels([one.value for one in sources]):
        figures = table(["mode", "method", "latency ms", "Hz", SCORE, SUCCESS], rows, left=2)
        caption = "Time passes while a chunk is made: further right it arrives later. Figures with 95 % intervals in the table."
        alt = f"Score against latency, {len(panels)} modes, {len(rows)} cells."
        blocks.append(Chart("clock", "Score against delay", alt, panels, figures, caption, columns=min(3, len(panels))))
    return [Section("On the clock", (*blocks, *folded))]
