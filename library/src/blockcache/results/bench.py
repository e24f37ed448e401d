"""What a benchmark measured, and the files that hold it: `bench --json`, and `paper performance` with more around it.

A file's benchmark is read as plain JSON values, checked against the same fields. Knows nothing of torch or of how
candidates are timed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, get_type_hints

from blockcache.files import Count, Fields, Format, Limit, Positive, dict_of, list_of
from blockcache.results.timings import MACHINE

_Time = Annotated[float, Limit(1e-9)]


@dataclass(frozen=True)
class Measurement:
    """One candidate. Milliseconds of whole generations; `max_difference` in normalised units, None across samplers."""

    name: str
    engine: str
    threads: Count
    p50_ms: _Time
    p95_ms: _Time
    p99_ms: _Time
    chunk_hz: float
    action_hz: float
    speedup: float
    over_full: float | None  # over the fastest full precision in the same engine and with the same threads
    gflop: float
    gflops: float
    of_peak: float
    max_difference: float | None
    saving: str | None  # which exact saving it adds to the candidate before it
    limit: bool  # whether the page says how far it is from the machine's peak
    samples_ms: list[float] = field(repr=False)


@dataclass(frozen=True)
class EncoderTime:
    """The encoder alone. `ceiling` is how much faster than eager a generation would be if the denoiser took no time at all;
    `shares` are the encoder's of each candidate that runs it so, by name."""

    engine: str
    threads: Count
    p50_ms: Positive
    gflop: float
    ceiling: float
    shares: dict[str, float]


@dataclass(frozen=True)
class Bench:
    """A whole run; its fields are the keys of the file."""

    shape: dict[str, Any]
    schedule: dict[str, Any]
    machine: dict[str, Any]
    peak_gflops: dict[str, float]
    repeats: int
    eager: str
    rows: list[Measurement]
    unavailable: dict[str, str]
    encoder: list[EncoderTime]

    def to_dict(self) -> dict[str, Any]:
        """Without an encoder where the policy has none."""
        return {name: value for name, value in asdict(self).items() if name != "encoder" or value}


def _fields(value: type, *optional: str) -> Fields:
    hints = get_type_hints(value, include_extras=True)
    return Fields(
        {name: kind for name, kind in hints.items() if name not in optional}, {name: hints[name] for name in optional}
    )


_RUN = {
    "shape": dict,
    "schedule": dict,
    "machine": MACHINE,
    "peak_gflops": dict[str, _Time],
    "unavailable": dict[str, str],
    "repeats": Count,
    "eager": str,
    "rows": list_of(_fields(Measurement, "samples_ms")),
}
_ENCODER = {"encoder": list_of(_fields(EncoderTime))}
FORMAT = Format("blockcache.bench", "benchmark", {**_RUN, **_ENCODER}, optional=("made_by", "encoder"))

_KIND = Fields({"kind": str, "nodes": Count, "ms": _Time, "gflops": float | None})
_ENGINES = Fields(dict.fromkeys(("patched", "loop", "onnx_1", "onnx_n"), float))
_POINTS = list_of(Fields({"x": Count, "computed": Count, "ms": float}))
_SIZES = ("weights_mb", "file_mb", "export_s", "load_s", "peak_over_weights", "peak_mb", "growth_mb")
_TOTALS = ("plain_s", "costs_s", "plain_mb", "costs_mb", "solve_s")
PERFORMANCE = Format(
    "blockcache.performance",
    "performance file",
    {
        "bench": Fields(_RUN, _ENCODER, others=True),
        "limits": list_of(Fields({"threads": Count, "peak_gflops": _Time, "kinds": list_of(_KIND)})),
        "shapes": list_of(Fields({"name": str, "ms": _ENGINES, "difference": _ENGINES})),
        "growth": Fields({"steps": _POINTS, "updates": _POINTS}),
        "footprint": dict_of(
            Fields(
                {**dict.fromkeys(_SIZES, float), "p50_ms": _Time, "p99_ms": _Time, "calls": Count, "generations": Count}
            )
        ),
        "calibration": Fields(
            {**dict.fromkeys(("observations", "blocks", "steps"), Count), **dict.fromkeys(_TOTALS, float)}
        ),
    },
    optional=("made_by", "limits", "calibration"),
)
