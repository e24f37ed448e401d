"""What each block adds at each step of a generation, in full or by a schedule: what the analyses start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockcache.attach.generation import Generation, LayerCall, attach
from blockcache.models.port import Port
from blockcache.models.sampling import generate
from blockcache.observations import batch_size, parts, rows
from blockcache.schedule import Reuse, Schedule, compile_plan

HELD_BYTES = 200 * 2**20
"""Residuals of one generation; larger batches of observations are run in parts."""


def every_step(port: Port) -> Schedule:
    """The schedule that computes every block at every step."""
    return Schedule.every_step(len(port.timesteps), [block.name for block in port.adapter.blocks])


def residuals(
    port: Port,
    schedule: Schedule,
    batch: Any,
    seed: int,
    blocks: Sequence[str] | None = None,
    *,
    one_noise: bool = False,
) -> dict[str, Tensor]:
    """What each of the blocks (all, unless some are named) added at each step, (K, B, T, d), of a batch as files have it."""
    recorded = _RecordingGeneration(schedule, schedule.blocks if blocks is None else blocks)
    run(port, recorded, batch, seed, one_noise=one_noise)
    return {name: torch.stack(found) for name, found in recorded.used.items()}


@torch.no_grad()  # a graph over all steps would take gigabytes
def run(port: Port, generation: Generation, batch: Any, seed: int, *, one_noise: bool = False) -> Any:
    """One generation of the policy as `generation` decides it; noise depends on the seed alone.

    With `one_noise` all samples have the same, if the policy takes any; to others samples are given one at a time.
    """
    with attach(port, lambda: generation):
        entry, given = getattr(port.policy, port.entry), port.prepare_observation(batch)
        if not (one_noise and port.takes_noise):
            return generate(entry, given, seed)
        noise = port.draw_noise(1, torch.Generator().manual_seed(seed))  # (1 + draws, 1, T, D)
        return entry(given, noise=noise.repeat(1, batch_size(batch), 1, 1))


def in_parts(port: Port, observations: Any, most: int = 16) -> list[Any]:
    """A batch cut so that the residuals of a part fit into `HELD_BYTES`; one sample is run to see how large they are.

    Args:
        port: The policy.
        observations: The batch.
        most: Samples in a part.
    """
    one = residuals(port, every_step(port), rows(observations, 0, 1), 0)
    size = sum(item.numel() * item.element_size() for item in one.values())
    return parts(observations, max(1, min(most, HELD_BYTES // size, batch_size(observations))))


def relative(used: Tensor, true: Tensor) -> Tensor:
    """|used - true| / |true| of each sample (L2), (..., B, T, d) -> (..., B)."""
    difference, size = (item.flatten(-2).norm(dim=-1) for item in (used - true, true))
    shares: Tensor = difference / size.clamp_min(torch.finfo(torch.float32).tiny)
    return shares


def update_marks(schedule: Schedule) -> list[list[bool]]:
    """(blocks, K): whether the block is computed at the step."""
    return [[step in steps for step in range(schedule.steps)] for steps in schedule.update_sets.values()]


class _RecordingGeneration(Generation):
    """Follows a schedule and keeps what some blocks add."""

    def __init__(self, schedule: Schedule, blocks: Sequence[str]) -> None:
        self.reuse: Reuse[Tensor] = Reuse(compile_plan(schedule))
        self.used: Mapping[str, list[Tensor]] = {name: [] for name in blocks}

    def layer(self, call: LayerCall) -> Tensor:
        def route(name: str, compute: Callable[[], Tensor]) -> Tensor:
            added = self.reuse.block(call.step, name, compute)
            if name in self.used:
                self.used[name].append(added)
            return added

        return call.routed(route)
