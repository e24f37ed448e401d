"""Speed against accuracy, open loop: every method timed in one interleaved run and compared with the full policy.

Knows nothing of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from blockcache.compare.candidates import Candidate, running
from blockcache.measure.action_error import ActionError, action_error, actions
from blockcache.measure.latency import Latency, measure
from blockcache.models.port import Port
from blockcache.observations import parts, rows
from blockcache.results.rollouts import EAGER, PLAIN


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
    methods: Mapping[str, Candidate],
    observations: Any,
    *,
    repeats: int = 10,
    batch: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> Tradeoff:
    """Compare methods with the full policy, open loop.

    methods       candidates by name
    observations  a batch: all are used for accuracy, `batch` at a time, the first one for speed
    repeats       interleaved rounds
    seed          of the noise, the same for every method; one with fewer steps shares the initial noise only
    """
    one, batches = rows(observations, 0, 1), parts(observations, batch)
    with ExitStack() as stack:
        everything = {PLAIN: Candidate(), **methods}
        started = {name: stack.enter_context(running(port, candidate)) for name, candidate in everything.items()}
        latency = measure({name: fast.timed(one) for name, fast in started.items()}, repeats, progress=progress)
        note = "comparing actions" if progress else None
        plain = started.pop(PLAIN)
        full = actions(plain.act, batches, seed, note)
        floor = action_error(actions(plain.act, batches, seed + 10_000, note), full, port.action_scale)
        errors = {
            name: action_error(actions(fast.act, batches, seed, note), full, port.action_scale)
            for name, fast in started.items()
        }
    found = [MethodTradeoff("full precision", EAGER, latency[PLAIN], 1.0, Candidate().flops(port, 0.0), 0.0, None)]
    for name, fast in started.items():
        stats = fast.stats()
        reused = 0.0 if stats is None else stats.reused_share
        flops = methods[name].flops(port, reused)
        speedup = latency[name].over(latency[PLAIN])
        found.append(MethodTradeoff(name, fast.engine, latency[name], speedup, flops, reused, errors[name]))
    return Tradeoff(tuple(found), floor)
