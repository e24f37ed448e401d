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
"""Steps of a generation at most, and how often each group is timed, all interleaved."""
ONCE = "once"  # the generation in which every block is computed once
LEAST = 0.05
"""Of what its share of the FLOPs would take: a difference of two measured times may come out as nothing."""


def block_milliseconds(port: Port, observation: Any, engine: str) -> dict[str, float]:
    """By block. Blocks of one kind and as many FLOPs take the same time, so each such group is timed as a whole: computed at
    every step, against a generation in which every block is computed once.

    Args:
        port: The policy.
        observation: A batch of one.
        engine: By name.
    """
    if isinstance(port.sampler, Diffusion) and len(port.timesteps) > STEPS:
        port = port.with_sampler(fewer_steps(port.sampler, port.sampler.type, STEPS))
    blocks, steps = port.adapter.blocks, len(port.timesteps)
    if steps < 2:
        return {block.name: float(block.cost) for block in blocks}
    groups: dict[Any, list[str]] = {ONCE: []}  # what is computed at every step, by kind and FLOPs
    for block in blocks:
        groups.setdefault((block.kind, block.cost), []).append(block.name)
    with ExitStack() as stack:
        timed = {}
        for group, names in groups.items():
            updates = {block.name: range(steps if block.name in names else 1) for block in blocks}
            schedule = Schedule(steps, {name: tuple(at) for name, at in updates.items()}, port.fingerprint)
            fast = stack.enter_context(running(port, Candidate(schedule, engine)))
            timed[group] = fast.timed(observation)
        found = {group: 1e3 * latency.p50 for group, latency in measure(timed, CALLS, progress=False).items()}
    # milliseconds of an update of all blocks of a group
    more = {group: (ms - found[ONCE]) / (steps - 1) for group, ms in found.items() if group != ONCE}
    per_flop = abs(sum(more.values())) / sum(block.cost for block in blocks)
    times = {}
    for block in blocks:
        group = block.kind, block.cost
        times[block.name] = max(more[group] / len(groups[group]), LEAST * per_flop * block.cost, 1e-6)
    return times
