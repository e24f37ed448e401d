"""How long a chunk takes: bars from a benchmark, or from the timings of a suite. Knows nothing of torch."""

from __future__ import annotations

from blockcache.compare.methods import method_named
from blockcache.report.bench import bar_chart, bench_chart
from blockcache.report.chart import Bars
from blockcache.report.document import Block, Chart, Section, plain, table
from blockcache.report.overview.sources import Source, Sources
from blockcache.report.overview.words import code, missing
from blockcache.results.rollouts import PLAIN
from blockcache.results.timings import Timings


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
