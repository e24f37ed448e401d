"""docs/performance.md and its pictures, from the JSON that `blockcache performance` wrote."""

from __future__ import annotations

import io
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from blockcache.errors import FileError
from blockcache.files import Format, PathLike, write_bytes
from blockcache.report.markdown import table

FORMAT = Format(
    "blockcache.performance",
    "performance file",
    {"bench": dict, "shapes": list, "growth": dict, "footprint": dict},
    optional=("made_by",),
)

_INK = {"eager": "#8a8a8a", "patched": "#4c78a8", "loop": "#54a24b", "onnx": "#e45756"}


def require_matplotlib() -> None:
    """Refuse before anything is measured what could not be drawn afterwards."""
    if find_spec("matplotlib") is None:
        raise FileError('pictures need matplotlib, which is not installed: pip install "blockcache[plots]"')


def plot_bench(bench: Mapping[str, Any], path: PathLike) -> None:
    """Milliseconds per chunk, one bar a candidate, on a logarithmic axis."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in bench["rows"] if not row["name"].startswith("savings")]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.2), layout="constrained")
    places = range(len(rows), 0, -1)
    axes.barh(places, [row["p50_ms"] for row in rows], color=[_INK[row["engine"]] for row in rows], height=0.7)
    for place, row in zip(places, rows, strict=True):
        axes.text(
            row["p50_ms"] * 1.04, place, f"{row['p50_ms']:.0f} ms, {row['speedup']:.1f}x", va="center", fontsize=8
        )
    axes.set_yticks(list(places), [row["name"] for row in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(min(row["p50_ms"] for row in rows) / 3, max(row["p50_ms"] for row in rows) * 3)
    axes.set_xlabel("milliseconds per action chunk (median, logarithmic)")
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)
    plt.close(figure)


def plot_growth(growth: Mapping[str, Any], path: PathLike) -> None:
    """Cost against steps and against updates, each with the straight line through its points."""
    require_matplotlib()
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    labels = {"steps": "denoising steps K (a tenth of them updates)", "updates": "update steps per block S (K = 100)"}
    for axes, (name, label) in zip(both, labels.items(), strict=True):
        x, y = (np.array([point[key] for point in growth[name]]) for key in ("x", "ms"))
        slope, start = np.polyfit(x, y, 1)
        ends = np.array([0, x.max()])
        axes.plot(ends, start + slope * ends, color="#bbbbbb", zorder=1)
        axes.scatter(x, y, color=_INK["onnx"], zorder=2)
        axes.set_xlabel(label)
        axes.set_title(f"{start:.1f} ms + {slope:.2f} ms x {'K' if name == 'steps' else 'S'}", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(0, y.max() * 1.1)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("ms per chunk (onnx, 1 thread)")
    _save(figure, path)
    plt.close(figure)


def _save(figure: Any, path: PathLike) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_bytes(path, buffer.getvalue())


def page(results: Mapping[str, Any]) -> str:
    """The whole page in Markdown."""
    bench, machine = results["bench"], results["bench"]["machine"]
    peaks = ", ".join(f"{value:.0f} GFLOP/s with {count} thread(s)" for count, value in bench["peak_gflops"].items())
    by_name = {row["name"]: row for row in bench["rows"]}
    return "\n".join(
        [
            "# Performance",
            "",
            f"Made by `blockcache performance -o docs --repeats {bench['repeats']}`; every figure below is of that one run. Ratios",
            "come from interleaved rounds: each round calls every candidate once, and a speed-up is the median of the rounds' ratios.",
            "",
            f"Machine: {machine['processor']}, {machine['cores']} cores; torch {machine['torch']}, ONNX Runtime "
            f"{machine['onnxruntime']}, diffusers {machine['diffusers']}. Peak of a 1024 x 1024 float32 matrix product: {peaks}.",
            "Nothing here was measured on a GPU. The loop engine has static shapes and no host synchronisation, so CUDA",
            "graphs can capture it, but that is unmeasured.",
            "",
            "## One chunk, paper's shape",
            "",
            f"DP-T {bench['shape']['layers']} x {bench['shape']['width']}, T = {bench['shape']['horizon']}, "
            f"K = {bench['shape']['steps']} {bench['shape']['sampler'].upper()}, batch 1, the printed square_ph schedule "
            f"({bench['schedule']['reused_share']:.1%} reused), {bench['repeats']} rounds. Speed-ups are over "
            f"*{bench['eager']}*, the faster of the eager candidates. *Over full* compares with the fastest full precision in the same "
            "engine and with the same threads. *Difference* is the largest difference of any action to eager full precision "
            "with the same noise (normalised units; weights are random here, so only the rows without a schedule mean "
            "something: the accuracy of schedules is measured on trained policies).",
            "",
            "![milliseconds per chunk](performance-bench.png)",
            "",
            table(
                [
                    "candidate",
                    "p50 ms",
                    "p95",
                    "p99",
                    "chunk Hz",
                    "action Hz",
                    "over eager",
                    "over full",
                    "GFLOP",
                    "GFLOP/s",
                    "of peak",
                    "difference",
                ],
                [_bench_row(row) for row in bench["rows"] if not row["name"].startswith("savings")],
            ),
            "",
            *[f"Not available: {name} ({reason})." for name, reason in bench["unavailable"].items()],
            "",
            "## The exact savings, one by one",
            "",
            "Full precision in the loop engine. Each line adds one saving to the line above; all give the same actions.",
            "",
            table(
                ["saving", "p50 ms", "over eager", "GFLOP", "difference"],
                [_savings_row(row) for row in bench["rows"] if row["name"].startswith("savings")],
            ),
            "",
            "## Other shapes",
            "",
            "Milliseconds per call under the square_ph schedule, stretched where K differs; the largest difference to the "
            "patched engine (same noise, actions in normalised units, relative to the largest one where that is above 1).",
            "",
            table(
                ["shape", "patched", "loop", "onnx, 1 thread", "onnx, all cores", "difference"],
                [_shape_row(row) for row in results["shapes"]],
            ),
            "",
            "## Cost grows in straight lines",
            "",
            "![growth](performance-growth.png)",
            "",
            "Uniform schedules, onnx with one thread. Left K grows at a fixed share of updates, right the updates at K = 100.",
            "",
            "## Files, memory, long runs",
            "",
            table(
                [
                    "shape",
                    "weights MB",
                    "file MB",
                    "export s",
                    "load s",
                    "peak memory / weights",
                    "p50 ms",
                    "p99 / p50",
                    "memory growth MB",
                ],
                [_footprint_row(name, row) for name, row in results["footprint"].items()],
            ),
            "",
            "Each in a process of its own, one thread; *p99 / p50* over the stated calls, growth of memory over the stated generations:",
            ", ".join(
                f"{n}: {r['calls']} calls, {r['generations']} generations" for n, r in results["footprint"].items()
            )
            + ".",
            "",
            "## The limit, and what is still lost",
            "",
            *_limit(by_name, bench),
            "",
        ]
    )


def _bench_row(row: Mapping[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['p50_ms']:.1f}",
        f"{row['p95_ms']:.1f}",
        f"{row['p99_ms']:.1f}",
        f"{row['chunk_hz']:.1f}",
        f"{row['action_hz']:.0f}",
        f"{row['speedup']:.1f}x",
        "" if row["over_full"] is None else f"{row['over_full']:.1f}x",
        f"{row['gflop']:.2f}",
        f"{row['gflops']:.1f}",
        f"{row['of_peak']:.0%}",
        "" if row["max_difference"] is None else f"{row['max_difference']:.0e}",
    ]


def _savings_row(row: Mapping[str, Any]) -> list[str]:
    name = row["name"].removeprefix("savings: ")
    return [
        name,
        f"{row['p50_ms']:.1f}",
        f"{row['speedup']:.2f}x",
        f"{row['gflop']:.2f}",
        f"{row['max_difference']:.0e}",
    ]


def _shape_row(row: Mapping[str, Any]) -> list[str]:
    times = [f"{row['ms'][name]:.1f}" for name in ("patched", "loop", "onnx_1", "onnx_n")]
    return [row["name"], *times, f"{max(row['difference'].values()):.0e}"]


def _footprint_row(name: str, row: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{row['weights_mb']:.1f}",
        f"{row['file_mb']:.1f}",
        f"{row['export_s']:.1f}",
        f"{row['load_s']:.2f}",
        f"{row['peak_over_weights']:.2f}",
        f"{row['p50_ms']:.1f}",
        f"{row['p99_ms'] / row['p50_ms']:.2f}",
        f"{row['growth_mb']:.1f}",
    ]


def _limit(rows: Mapping[str, Mapping[str, Any]], bench: Mapping[str, Any]) -> list[str]:
    fast = [row for name, row in rows.items() if name.startswith("BAC, onnx") and "executed" not in name]
    lines = []
    for row in fast:
        peak = bench["peak_gflops"][str(row["threads"])]
        ideal = row["gflop"] / peak * 1e3
        lines.append(
            f"- {row['name']}: {row['gflop']:.2f} GFLOP remain; at the machine's peak they would take {ideal:.1f} ms, they take "
            f"{row['p50_ms']:.1f} ms ({row['of_peak']:.0%} of peak)."
        )
    return [
        *lines,
        "",
        "What lies between: products of 10 rows do not reach the rate of large ones; about three thousand nodes cost about a",
        "microsecond each; norms, softmax and GELU are not counted as FLOPs; and a second thread shares products of this size",
        "only partly. Fewer and larger nodes are where the next gain is, not fewer FLOPs.",
    ]
