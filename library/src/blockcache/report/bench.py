"""A benchmark as a table, a chart and sentences, from the values of its file. Knows nothing of torch or of terminals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blockcache.palette import Colour
from blockcache.report.chart import Axis, Bars, Panel
from blockcache.report.document import Chart, Paragraph, Table, plain, table_of
from blockcache.results.rollouts import EAGER

BENCH_COLUMNS = {
    "candidate": ("name", "{}"),
    "p50 ms": ("p50_ms", "{:.1f}"),
    "p95": ("p95_ms", "{:.1f}"),
    "p99": ("p99_ms", "{:.1f}"),
    "chunk Hz": ("chunk_hz", "{:.1f}"),
    "action Hz": ("action_hz", "{:.0f}"),
    "over eager": ("speedup", "{:.1f}x"),
    "over full": ("over_full", "{:.1f}x"),
    "GFLOP": ("gflop", "{:.2f}"),
    "GFLOP/s": ("gflops", "{:.1f}"),
    "of peak": ("of_peak", "{:.0%}"),
    "difference": ("max_difference", "{:.0e}"),
}
_ENGINES: dict[str, Colour] = {EAGER: "grey", "patched": "sky", "loop": "green", "onnx": "orange"}


def bench_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Candidates of a benchmark, from the `rows` of its JSON.

    Args:
        rows: One mapping for each candidate, with the fields of `results.bench.Measurement`.
    """
    return table_of(BENCH_COLUMNS, rows)


def bench_chart(bench: Mapping[str, Any], name: str = "bench", source: str = "") -> Chart:
    """Milliseconds per chunk, one bar a candidate.

    Args:
        bench: What the file holds.
        name: Of the chart.
        source: Where the figures are from, as a sentence, if that should be said.
    """
    rows, shape = [row for row in bench["rows"] if not row["saving"]], bench["shape"]
    kept = ("layers", "width", "horizon", "steps", "sampler", "batch")
    sizes = ", ".join(f"{size} {shape[size]}" for size in kept if size in shape)
    bars = Bars(
        "ms",
        tuple(row["p50_ms"] for row in rows),
        tuple(_ENGINES.get(row["engine"], "ink") for row in rows),
        tuple(
            f"{row['p50_ms']:.2f} ms (p50), {row['p95_ms']:.2f} (p95), {row['speedup']:.1f}x {bench['eager']}"
            for row in rows
        ),
        shown=tuple(f"{row['p50_ms']:.1f}, {row['speedup']:.1f}x" for row in rows),
    )
    caption = (
        f"A policy of this shape with random weights or your own: {plain(sizes)}; {bench['repeats']} interleaved rounds on "
        f"{plain(bench['machine']['processor'])}. Grey: plain torch; light blue: patched; green: loop; orange: onnx. {source}"
    )
    return bar_chart(
        name, "One chunk by engine", [row["name"] for row in rows], bars, bench_table(rows), caption.rstrip()
    )


def bar_chart(name: str, title: str, words: Sequence[str], bars: Bars, figures: Table, caption: str) -> Chart:
    """Milliseconds per chunk by name, the first name at the top.

    Args:
        name: Of the chart.
        title: What it shows.
        words: What each bar stands for.
        bars: The bars.
        figures: The same as a table.
        caption: How to read it.
    """
    values = dict(zip(words, bars.values, strict=True))
    best, worst = min(values, key=lambda word: values[word]), max(values, key=lambda word: values[word])
    alt = f"{len(words)} bars, from {best} with {values[best]:.1f} ms to {worst} with {values[worst]:.1f} ms."
    panel = Panel(Axis("ms per chunk (p50)", log=min(bars.values) > 0), Axis("", names=tuple(words)), (bars,))
    return Chart(name, title, alt, (panel,), figures, caption)


def not_available(bench: Mapping[str, Any]) -> Paragraph:
    """Which candidates could not be measured, and why.

    Args:
        bench: What the benchmark's file holds.
    """
    missing = [f"Not available: {name} ({plain(reason)})." for name, reason in bench["unavailable"].items()]
    return Paragraph("\n".join(missing))


def encoder_ceilings(bench: Mapping[str, Any]) -> Paragraph:
    """For each way to run a camera policy's encoder: its time, its share, and the speed-up that it leaves room for.

    Args:
        bench: What the benchmark's file holds.
    """
    lines = []
    for item in bench.get("encoder", ()):
        threads = f"{item['threads']} thread{'s' if item['threads'] > 1 else ''}"
        shares = ", ".join(f"{share:.0%} of {name}" for name, share in item["shares"].items())
        lines.append(
            f"The encoder in {item['engine']}, {threads}: {item['p50_ms']:.1f} ms{f' ({shares})' if shares else ''}; however fast "
            f"the denoiser, a generation is at most {item['ceiling']:.1f}x as fast as {bench['eager']}."
        )
    return Paragraph("\n".join(lines))
