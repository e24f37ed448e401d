"""What a benchmark measured, and the file that holds it, which `bench --json` writes.

A file's benchmark is read as plain JSON values, checked against the same fields. Knows nothing of torch or of how
candidates are timed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from blockcache.files import Count, Fields, Format, Limit, Positive, keys_of, list_of
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
    machine: Annotated[dict[str, Any], MACHINE]
    peak_gflops: dict[str, _Time]
    repeats: Count
    eager: str
    rows: list[Measurement]
    unavailable: dict[str, str]
    encoder: list[EncoderTime]

    def to_dict(self) -> dict[str, Any]:
        """Without an encoder where the policy has none."""
        return {name: value for name, value in asdict(self).items() if name != "encoder" or value}


_ROW = dict(keys_of(Measurement))
RUN = {**keys_of(Bench), "rows": list_of(Fields(_ROW, {"samples_ms": _ROW.pop("samples_ms")}))}
ENCODER = {"encoder": list_of(Fields(keys_of(EncoderTime)))}
"""Keys of the file, and the one that it may lack."""
FORMAT = Format(
    "blockcache.bench", "benchmark", {**RUN, **ENCODER, "command": str}, optional=("made_by", "encoder", "command")
)
