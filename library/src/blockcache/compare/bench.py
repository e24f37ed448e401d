"""The benchmark: one table from one interleaved run, what users run today beside every engine.

Measures whatever policy is behind a port. Knows nothing of tasks or families.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch

from blockcache.compare.bench_candidates import CandidateMaker, Timed
from blockcache.errors import in_one_line
from blockcache.measure import machine
from blockcache.measure.latency import Latency, measure
from blockcache.models.port import Port
from blockcache.observations import batch_size
from blockcache.results.bench import Bench, EncoderTime, Measurement
from blockcache.results.rollouts import EAGER
from blockcache.schedule import Schedule

MORE = "blockcache.bench"
"""The group of entry points under which other packages register functions that add candidates to a `CandidateMaker`."""


def run_bench(
    port: Port,
    schedule: Schedule,
    observations: Any,
    shape: dict[str, Any],
    *,
    threads: int,
    repeats: int,
    quick: bool = False,
    named: str = "BAC",
    progress: bool = True,
) -> Bench:
    """Measure all candidates in one interleaved run.

    Args:
        port: The policy.
        schedule: One to follow, beside full precision.
        observations: The batch that every call answers.
        shape: The policy's sizes, for the record.
        threads: Engines are measured with one thread and with this many.
        repeats: Interleaved rounds.
        quick: Leaves out torch.compile, the samplers with fewer steps and what other packages add.
        named: What the schedule is called in the table.
        progress: Whether to show a bar.
    """
    counts = sorted({1, threads})
    peaks = {str(count): machine.peak_gflops(count) for count in counts}
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        maker = CandidateMaker(stack, port, schedule, observations, named)
        for count in counts:
            maker.eager(count)
        if not quick:
            maker.compiled(threads)
            maker.fewer(16, 10, 50)
        maker.engines(counts, quick)
        if not quick:
            for point in sorted(entry_points(group=MORE), key=lambda point: point.name):
                try:
                    add = point.load()
                except Exception as error:  # a broken package disturbs nothing else
                    maker.unavailable[f"{MORE} {point.name}"] = in_one_line(error)
                    continue
                add(maker)
        candidates = maker.candidates
        encoders = maker.encoder(counts)
        latencies = measure({c.name: c.call for c in (*candidates, *encoders)}, repeats, progress=progress)
        found = {c.name: port.action_of(c.answer()).detach() for c in candidates if c.comparable}
        plain, scale = found[candidates[0].name], port.action_scale
        gaps = {name: np.abs((action - plain).cpu().numpy() * scale).max() for name, action in found.items()}
    eager = min((c.name for c in candidates[: len(counts)]), key=lambda name: latencies[name].p50)
    batch = batch_size(observations)

    def row(candidate: Timed) -> Measurement:
        latency, gap = latencies[candidate.name], gaps.get(candidate.name)
        rate = batch * candidate.flops / latency.p50 / 1e9
        return Measurement(
            name=candidate.name,
            engine=candidate.engine,
            threads=candidate.threads,
            p50_ms=latency.p50 * 1e3,
            p95_ms=latency.percentile(95) * 1e3,
            p99_ms=latency.percentile(99) * 1e3,
            chunk_hz=1 / latency.p50,
            action_hz=port.n_action_steps / latency.p50,
            speedup=latency.over(latencies[eager]),
            over_full=min((latency.over(latencies[name]) for name in candidate.full), default=None),
            gflop=candidate.flops / 1e9,
            gflops=rate,
            of_peak=rate / peaks[str(candidate.threads)],
            max_difference=None if gap is None else float(gap),
            saving=candidate.saving,
            limit=candidate.limit,
            samples_ms=[round(float(value) * 1e3, 4) for value in latency.seconds],
        )

    return Bench(
        shape=shape,
        schedule={"computed": schedule.computed, "reused_share": schedule.reused_share, **dict(schedule.origin)},
        machine=machine.describe(),
        peak_gflops=peaks,
        repeats=repeats,
        eager=eager,
        rows=list(map(row, candidates)),
        unavailable=maker.unavailable,
        encoder=[_encoder_time(one, candidates, latencies, port.begins_after_encoder, eager) for one in encoders],
    )


def _encoder_time(
    encoder: Timed, candidates: list[Timed], latencies: dict[str, Latency], own_code: bool, eager: str
) -> EncoderTime:
    """The encoder by itself beside the candidates that run it so, and the ceiling that it sets: caching makes the denoiser
    faster, and never the encoder (Amdahl's law). With `own_code` all engines leave it to the policy's own code."""

    def runs_it(candidate: Timed) -> bool:
        engine = candidate.engine if candidate.engine in ("loop", "onnx") and not own_code else EAGER
        threads = 1 if own_code and candidate.engine != EAGER else candidate.threads
        return (encoder.engine, encoder.threads) == (engine, threads) and not candidate.saving

    seconds = latencies[encoder.name].p50
    return EncoderTime(
        engine=encoder.engine,
        threads=encoder.threads,
        p50_ms=seconds * 1e3,
        gflop=encoder.flops / 1e9,
        ceiling=latencies[eager].p50 / seconds,
        shares={one.name: seconds / latencies[one.name].p50 for one in candidates if runs_it(one)},
    )
