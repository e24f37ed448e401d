"""Speed against accuracy, open loop: every method timed in one interleaved run and compared with the full policy.

Knows nothing of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from blockcache.compare.candidates import Candidate, running
from blockcache.measure.action_error import ActionError, action_error, actions
from blockcache.measure.latency import Latency, measure
from blockcache.models.port import Port
from blockcache.observations import parts, rows
from blockcache.results.rollouts import EAGER


@dataclass(frozen=True, eq=False)
class MethodTradeoff:
    name: str
    engine: str
    latency: Latency
    speedup: float  # over the plain policy, in the same run
    flops: int
    reused: float
    error: ActionError | None  # None for the plain policy itself


@dataclass(frozen=True, eq=False)
class Tradeoff:
    rows: tuple[MethodTradeoff, ...]
    noise_floor: ActionError


def tradeoff(
    port: Port,
    methods: Sequence[tuple[str, Candidate]],
    observations: Any,
    *,
    repeats: int = 10,
    batch: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> Tradeoff:
    """Compare methods with the full policy, open loop.

    Args:
        port: The policy.
        methods: Candidates, each with a name for people.
        observations: A batch: all are used for accuracy, the first one for speed.
        repeats: Interleaved rounds.
        batch: Observations run at once.
        seed: Of the noise, the same for every method; one with fewer steps shares the initial noise only.
        progress: Whether to show bars.
    """
    one, batches = rows(observations, 0, 1), parts(observations, batch)
    note = "comparing actions" if progress else None
    with ExitStack() as stack:
        plain, *others = [stack.enter_context(running(port, item)) for _, item in [("", Candidate()), *methods]]
        timed = {str(place): fast.timed(one) for place, fast in enumerate([plain, *others])}
        plain_time, *times = measure(timed, repeats, progress=progress).values()
        full = actions(plain.act, batches, seed, note)
        floor = action_error(actions(plain.act, batches, seed + 10_000, note), full, port.action_scale)
        errors = [action_error(actions(fast.act, batches, seed, note), full, port.action_scale) for fast in others]
    found = [MethodTradeoff("full precision", EAGER, plain_time, 1.0, Candidate().flops(port, 0.0), 0.0, None)]
    for (name, candidate), fast, latency, error in zip(methods, others, times, errors, strict=True):
        stats = fast.stats()
        reused = 0.0 if stats is None else stats.reused_share
        flops, speedup = candidate.flops(port, reused), latency.over(plain_time)
        found.append(MethodTradeoff(name, fast.engine, latency, speedup, flops, reused, error))
    return Tradeoff(tuple(found), floor)
