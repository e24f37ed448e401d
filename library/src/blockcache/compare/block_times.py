"""How long one update of each block takes on this machine, in the engine that is going to run it.

FLOPs tell only part of it: an attention of few tokens has hardly any, and takes its time all the same. Knows nothing of
solving.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from blockcache.compare.candidates import Candidate, running
from blockcache.measure.latency import measure
from blockcache.models.port import Port
from blockcache.samplers import Diffusion, fewer_steps
from blockcache.schedule import Schedule

STEPS, CALLS = 16, 15
LEAST = 0.05
"""Of what its share of the FLOPs would take: a difference of two measured times may come out as nothing."""


def block_milliseconds(port: Port, observation: Any, engine: str, calls: int = CALLS) -> dict[str, float]:
    """By block. Blocks of one kind and as many FLOPs take the same time, so each such group is timed as a whole: computed at
    every step, against a generation in which every block is computed once.

    Args:
        port: The policy.
        observation: A batch of one.
        engine: By name.
        calls: Timed for each group, all interleaved.
    """
    if isinstance(port.sampler, Diffusion) and len(port.timesteps) > STEPS:
        port = port.with_sampler(fewer_steps(port.sampler, port.sampler.type, STEPS))
    blocks, steps = port.adapter.blocks, len(port.timesteps)
    if steps < 2:
        return {block.name: float(block.cost) for block in blocks}
    groups: dict[Any, list[str]] = {}
    for block in blocks:
        groups.setdefault((block.kind, block.cost), []).append(block.name)
    once: dict[str, tuple[int, ...]] = {block.name: (0,) for block in blocks}
    always = tuple(range(steps))
    updates = {"once": once} | {str(key): {**once, **dict.fromkeys(names, always)} for key, names in groups.items()}
    with ExitStack() as stack:
        timed = {}
        for name, when in updates.items():
            schedule = Schedule(steps, when, port.fingerprint)
            fast = stack.enter_context(running(port, Candidate(schedule, engine)))
            timed[name] = fast.timed(observation)
        found = {name: 1e3 * latency.p50 for name, latency in measure(timed, calls, progress=False).items()}
    per_flop = sum(found[str(key)] - found["once"] for key in groups) / (
        (steps - 1) * sum(block.cost for block in blocks)
    )
    times = {}
    for (kind, cost), names in groups.items():
        one = (found[str((kind, cost))] - found["once"]) / (len(names) * (steps - 1))
        times.update(dict.fromkeys(names, max(one, LEAST * abs(per_flop) * cost, 1e-6)))
    return {block.name: times[block.name] for block in blocks}
