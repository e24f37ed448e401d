"""How long a camera policy's encoder takes by itself in each engine, and the ceiling that it sets: caching makes the
denoiser faster, and never the encoder (Amdahl's law).

Knows nothing of families or of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from blockcache.attach.generation import first_denoiser_call
from blockcache.attach.patching import Patches
from blockcache.compare.bench_candidates import Timed, on_threads
from blockcache.engines.loop import Constants, TorchBackend, by_moment
from blockcache.engines.onnx import open_cached
from blockcache.engines.rehearsal import rehearsed_build
from blockcache.engines.walk import perceive
from blockcache.errors import EngineError, FileError
from blockcache.measure.latency import Latency
from blockcache.models.port import Port
from blockcache.observations import batch_size
from blockcache.results.bench import EncoderTime
from blockcache.results.rollouts import EAGER
from blockcache.schedule import Schedule


@dataclass(frozen=True, eq=False)
class EncoderCall:
    engine: str
    threads: int
    call: Callable[[], Any]

    @property
    def name(self) -> str:
        return f"encoder, {self.engine}, {self.threads}"

    def runs_in(self, candidate: Timed, behind: bool) -> bool:
        """Whether a candidate runs its encoder so; behind an encoder that nobody knows, all run it in torch."""
        engine = candidate.engine if candidate.engine in ("loop", "onnx") and not behind else EAGER
        threads = 1 if behind and candidate.engine != EAGER else candidate.threads
        return (self.engine, self.threads) == (engine, threads)


def encoder_calls(
    stack: ExitStack, port: Port, schedule: Schedule, obs: Any, counts: Sequence[int]
) -> list[EncoderCall]:
    """The encoder by itself, in the policy's own code and in the engines that hold it; none for a policy without cameras.

    port      the policy
    schedule  of the engines whose encoder is meant
    obs       the batch that is looked at
    counts    of threads, for the policy's own and for onnx
    """
    if not port.begins_after_encoder and not port.cameras:
        return []
    own, patches = port.copy(), Patches()
    encode = first_denoiser_call(own, getattr(own.policy, own.entry), patches)
    stack.enter_context(patches)
    given = own.prepare_observation(obs)
    found = [EncoderCall(EAGER, count, on_threads(count, lambda: encode(given))) for count in counts]
    if port.begins_after_encoder:
        return found
    try:
        built = rehearsed_build(port, schedule, "loop")
    except EngineError:
        return found  # the other rows say why
    program, constants = built.program, Constants(built.program)
    observed = port.read_observation(given, program.like)

    @torch.no_grad()
    def look() -> Any:
        return perceive(TorchBackend(constants, batch_size(obs)), program, by_moment(observed, program))

    found.append(EncoderCall("loop", 1, on_threads(1, look)))
    for count in counts:
        try:
            runner = open_cached(built, port.fingerprint, count)
        except (EngineError, FileError):
            break
        found.append(EncoderCall("onnx", count, on_threads(1, partial(runner.features, observed))))
    return found


def encoder_times(
    calls: Sequence[EncoderCall], candidates: Sequence[Timed], latencies: Mapping[str, Latency], port: Port, eager: str
) -> list[EncoderTime]:
    """What was measured of the calls, beside the candidates of the same run."""
    found = []
    for one in calls:
        seconds = latencies[one.name].p50
        users = [item.name for item in candidates if one.runs_in(item, port.begins_after_encoder) and not item.saving]
        found.append(
            EncoderTime(
                engine=one.engine,
                threads=one.threads,
                p50_ms=seconds * 1e3,
                gflop=port.encoder_flops / 1e9,
                ceiling=latencies[eager].p50 / seconds,
                shares={name: seconds / latencies[name].p50 for name in users},
            )
        )
    return found
