"""docs/generated/performance.md, from the JSON that `blockcache paper performance` wrote; also what `paper flops` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from blockcache.files import Count, Fields, Format, Limit, dict_of, list_of
from blockcache.report.bench import BENCH_COLUMNS, bench_table, not_available
from blockcache.report.document import Bullets, Document, Figure, Paragraph, Section, Table, plain, table, table_of
from blockcache.results.bench import ENCODER, RUN

_Time = Annotated[float, Limit(1e-9)]
_ENGINES = Fields(dict.fromkeys(("patched", "loop", "onnx_1", "onnx_n"), float))
_SIZES = ("weights_mb", "file_mb", "export_s", "load_s", "peak_over_weights", "peak_mb", "growth_mb")
_TOTALS = ("plain_s", "costs_s", "plain_mb", "costs_mb", "solve_s")
FORMAT = Format(
    "blockcache.performance",
    "performance file",
    {
        "bench": Fields({name: RUN[name] for name in RUN if name != "encoder"}, ENCODER, others=True),
        "limits": list,  # this and growth are in older files, and are not shown any more
        "shapes": list_of(Fields({"name": str, "ms": _ENGINES, "difference": _ENGINES})),
        "growth": dict,
        "footprint": dict_of(
            Fields(
                {**dict.fromkeys(_SIZES, float), "p50_ms": _Time, "p99_ms": _Time, "calls": Count, "generations": Count}
            )
        ),
        "calibration": Fields(
            {**dict.fromkeys(("observations", "blocks", "steps"), Count), **dict.fromkeys(_TOTALS, float)}
        ),
    },
    optional=("made_by", "limits", "growth", "calibration"),
)
BENCH_PICTURE = "performance-bench.png"
_SAVINGS = {
    "saving": ("saving", "{}"),
    **{name: BENCH_COLUMNS[name] for name in ("p50 ms", "over eager", "GFLOP", "difference")},
    "over eager": ("speedup", "{:.2f}x"),
}
_FOOTPRINT = {
    "shape": ("shape", "{}"),
    "weights MB": ("weights_mb", "{:.1f}"),
    "file MB": ("file_mb", "{:.1f}"),
    "export s": ("export_s", "{:.1f}"),
    "load s": ("load_s", "{:.2f}"),
    "peak memory / weights": ("peak_over_weights", "{:.2f}"),
    "p50 ms": ("p50_ms", "{:.1f}"),
    "p99 / p50": ("p99_over_p50", "{:.2f}"),
    "memory growth MB": ("growth_mb", "{:.1f}"),
}

_LARGE_PAGES = (
    "\nWith *large pages* the process was started with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, which has Linux keep the weights\n"
    "in pages of 2 MB."
)


def page(results: Mapping[str, Any]) -> Document:
    """The whole page. Its pictures lie beside it.

    Args:
        results: The contents of the performance file.
    """
    bench, machine, feet = results["bench"], results["bench"]["machine"], results["footprint"]
    peaks = ", ".join(f"{value:.0f} GFLOP/s with {count} thread(s)" for count, value in bench["peak_gflops"].items())
    stated = ", ".join(
        f"{name}: {foot['calls']} calls, {foot['generations']} generations" for name, foot in feet.items()
    )
    savings = [row for row in bench["rows"] if row["saving"]]
    footprints = [{**row, "shape": name, "p99_over_p50": row["p99_ms"] / row["p50_ms"]} for name, row in feet.items()]
    return Document(
        "Performance",
        (
            Paragraph(
                f"Made by `blockcache paper performance -o docs/generated --repeats {bench['repeats']}`; every figure below is of that one run. Ratios\n"
                "come from interleaved rounds: each round calls every candidate once, and a speed-up is the median of the rounds' ratios."
            ),
            Paragraph(
                f"Machine: {plain(machine['processor'])}, {machine['cores']} cores; torch {machine['torch']}, ONNX Runtime "
                f"{machine['onnxruntime']}, diffusers {machine['diffusers']}. Peak of a 1024 x 1024 float32 matrix product: {peaks}.\n"
                "Nothing here was measured on a GPU. The loop engine has static shapes and no host synchronisation, so CUDA\n"
                "graphs can capture it, but that is unmeasured."
            ),
            _one_chunk(bench),
            Section(
                "The exact savings, one by one",
                (
                    Paragraph(
                        "Full precision in the loop engine. Each line adds one saving to the line above; all give the same actions."
                    ),
                    table_of(_SAVINGS, savings),
                ),
            ),
            Section(
                "Other shapes",
                (
                    Paragraph(
                        "Milliseconds per call under the square_ph schedule, stretched where K differs; the largest difference to the "
                        "patched engine (same noise, actions in normalised units, relative to the largest one where that is above 1)."
                    ),
                    _shapes(results["shapes"]),
                ),
            ),
            Section(
                "Files, memory, long runs",
                (
                    table_of(_FOOTPRINT, footprints),
                    Paragraph(
                        "Each in a process of its own, one thread; *p99 / p50* over the stated calls, growth of memory over the stated generations:\n"
                        f"{stated}.{_LARGE_PAGES if any('large pages' in name for name in feet) else ''}"
                    ),
                ),
            ),
            *_calibration(results.get("calibration")),
            Section("The limit, and what is still lost", (Bullets(_limits(bench)),)),
        ),
    )


def _calibration(found: Mapping[str, Any] | None) -> tuple[Section, ...]:
    """What a schedule costs before it saves anything."""
    if found is None:
        return ()
    rows = [
        [name, f"{found[f'{key}_s']:.1f}", f"{found[f'{key}_mb']:.0f}"]
        for name, key in (("similarities, for BAC", "plain"), ("with action costs", "costs"))
    ]
    text = (
        f"`calibrate` on the paper's shape, K = {found['steps']}, {found['blocks']} blocks, {found['observations']} observations, "
        "each in a process of its own; memory is the peak of the whole process, libraries and policy included. `solve` with "
        f"action costs takes {found['solve_s']:.2f} s."
    )
    return (Section("Calibration", (Paragraph(text), table(["recorded", "seconds", "peak MB"], rows))),)


def flops_table(full: int, schedules: Mapping[str, tuple[int, float]]) -> Table:
    """FLOPs of one generation.

    Args:
        full: In full precision.
        schedules: By name: under this schedule, and the share of block computations that it reuses.
    """
    rows = [["full precision", f"{full / 1e9:.3f}", "1.00x", "0.0%"]]
    rows += [
        [plain(name), f"{cost / 1e9:.3f}", f"1/{full / cost:.2f}", f"{reused:.1%}"]
        for name, (cost, reused) in schedules.items()
    ]
    return table(["schedule", "GFLOP", "of full", "reused"], rows)


def _one_chunk(bench: Mapping[str, Any]) -> Section:
    shape = bench["shape"]
    about = (
        f"DP-T {shape['layers']} x {shape['width']}, T = {shape['horizon']}, K = {shape['steps']} {shape['sampler'].upper()}, "
        f"batch 1, the printed square_ph schedule ({bench['schedule']['reused_share']:.1%} reused), {bench['repeats']} rounds. "
        f"Speed-ups are over *{bench['eager']}*, the faster of the eager candidates. *Over full* compares with the fastest full "
        "precision in the same engine and with the same threads. *Difference* is the largest difference of any action to eager "
        "full precision with the same noise (normalised units; weights are random here, so only the rows without a schedule mean "
        "something: the accuracy of schedules is measured on trained policies)."
    )
    return Section(
        "One chunk, paper's shape",
        (
            Paragraph(about),
            Figure(BENCH_PICTURE, "milliseconds per chunk"),
            bench_table(row for row in bench["rows"] if not row["saving"]),
            not_available(bench),
        ),
    )


def _shapes(found: Sequence[Mapping[str, Any]]) -> Table:
    engines = {"patched": "patched", "loop": "loop", "onnx, 1 thread": "onnx_1", "onnx, all cores": "onnx_n"}
    rows = [
        [
            row["name"],
            *(f"{row['ms'][name]:.1f}" for name in engines.values()),
            f"{max(row['difference'].values()):.0e}",
        ]
        for row in found
    ]
    return table(["shape", *engines, "difference"], rows)


def _limits(bench: Mapping[str, Any]) -> tuple[str, ...]:
    """How far each candidate that the benchmark marks is from the machine's peak."""
    fast = [row for row in bench["rows"] if row["limit"]]
    return tuple(
        f"{row['name']}: {row['gflop']:.2f} GFLOP remain; at the machine's peak they would take "
        f"{row['gflop'] / bench['peak_gflops'][str(row['threads'])] * 1e3:.1f} ms, they take {row['p50_ms']:.1f} ms "
        f"({row['of_peak']:.0%} of peak)."
        for row in fast
    )
