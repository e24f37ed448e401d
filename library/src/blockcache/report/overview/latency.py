"""How long a chunk takes: bars from a benchmark, or from the timings of a suite. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockcache.report.chart import Axis, Bars, Colour, Panel
from blockcache.report.document import Block, Chart, Section, plain, table
from blockcache.report.overview.sources import Source, Sources
from blockcache.report.overview.words import KINDS, OTHERS, code, method_kind, method_label, missing
from blockcache.report.performance import bench_table
from blockcache.report.suites import Timings
from blockcache.results.rollouts import EAGER, PLAIN

_ENGINES: dict[str, Colour] = {EAGER: "grey", "patched": "sky", "loop": "green", "onnx": "orange"}


def latency_section(sources: Sources) -> Section:
    blocks: list[Block] = [_timings(number, one) for number, one in enumerate(sources.timings, 1)]
    blocks += [_bench(number, one) for number, one in enumerate(sources.benches, 1)]
    if not sources.benches:
        blocks.append(missing("engines beside plain torch", f"blockcache bench {sources.typed} --json bench.json"))
    return Section("Milliseconds", tuple(blocks))


def _timings(number: int, source: Source[Timings]) -> Chart:
    timed = source.value
    ms = {name: latency.p50 * 1e3 for name, latency in timed.seconds.items()}
    names = sorted(ms, key=lambda name: ms[name])
    over = {name: timed.over(name, PLAIN) for name in names}
    colours = tuple(KINDS.get(method_kind(name), OTHERS)[0] if name != PLAIN else "grey" for name in names)
    words = tuple(PLAIN if name == PLAIN else method_label(name) for name in names)
    notes = tuple(f"{ms[name]:.2f} ms (p50)" + _times(over[name]) for name in names)
    rows = [
        [plain(word), f"{ms[name]:.2f}", f"{1e3 * timed.seconds[name].percentile(95):.2f}", "" if over[name] is None else f"{over[name]:.1f}x"]
        for word, name in zip(words, names, strict=True)
    ]  # fmt: skip
    return _bars(
        f"timings-{number}",
        "One chunk by method",
        words,
        Bars("ms", tuple(ms[name] for name in names), colours, notes),
        table(["method", "p50 ms", "p95 ms", "over the plain policy"], rows),
        f"{plain(timed.setting).capitalize()}; {plain(timed.machine['processor'])}. Colours as in the front. From {code(source.path)}.",
    )


def _times(over: float | None) -> str:
    return "" if over is None else f", {over:.1f}x the plain policy"


def _bench(number: int, source: Source[Mapping[str, Any]]) -> Chart:
    bench = source.value
    rows = [row for row in bench["rows"] if not row["saving"]]
    shape = bench["shape"]
    sizes = ", ".join(
        f"{name} {shape[name]}" for name in ("layers", "width", "horizon", "steps", "sampler", "batch") if name in shape
    )
    notes = tuple(
        f"{row['p50_ms']:.2f} ms (p50), {row['p95_ms']:.2f} (p95), {row['speedup']:.1f}x {bench['eager']}"
        for row in rows
    )
    return _bars(
        f"bench-{number}",
        "One chunk by engine",
        tuple(row["name"] for row in rows),
        Bars("ms", tuple(row["p50_ms"] for row in rows), tuple(_ENGINES.get(row["engine"], "ink") for row in rows), notes),
        bench_table(rows),
        f"A policy of this shape with random weights or your own: {plain(sizes)}; {bench['repeats']} interleaved rounds on "
        f"{plain(bench['machine']['processor'])}. Grey: plain torch; light blue: patched; green: loop; orange: onnx. From {code(source.path)}.",
    )  # fmt: skip


def _bars(name: str, title: str, words: tuple[str, ...], bars: Bars, behind: Any, caption: str) -> Chart:
    values = dict(zip(words, bars.values, strict=True))
    best, worst = min(values, key=lambda word: values[word]), max(values, key=lambda word: values[word])
    alt = f"{len(words)} bars, from {best} with {values[best]:.1f} ms to {worst} with {values[worst]:.1f} ms."
    panel = Panel(Axis("ms per chunk (p50)", log=min(bars.values) > 0), Axis("", names=words), (bars,))
    return Chart(name, title, alt, (panel,), behind, caption)
