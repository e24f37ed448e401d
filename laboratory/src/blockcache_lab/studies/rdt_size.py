"""RDT at its real size, random weights: the plain policy beside exact reuse of keys and values, in one interleaved run.

At 1.2 thousand million numbers the weights must be in memory once: every candidate runs on the same ones, one after the
other. `bench`, which gives each candidate a copy, is not for this. Knows nothing of tables.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.engines import accelerate
from blockcache.measure import machine
from blockcache.models.rdt.policy import RDTConfig, RDTPolicy, public_sampler
from blockcache.models.registry import port_of
from blockcache.progress import progress_bar
from blockcache.schedule import generation_flops

PLAIN = "plain"
ENGINES = ("patched", "loop")


def measure_size(
    config: RDTConfig, steps: Sequence[int], *, engines: Sequence[str] = ENGINES, repeats: int, threads: int
) -> dict[str, Any]:
    """Seconds of whole generations in full precision, batch 1, and the largest difference to the plain policy's actions.

    Args:
        config: Sizes; its sampler's steps do not count.
        steps: Of DPM-Solver++, one after the other.
        engines: Beside the plain policy.
        repeats: Interleaved rounds; there is no warm-up, since one round takes minutes.
        threads: Of torch.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        policy = RDTPolicy.random(config)
        weights = sum(tensor.nbytes for tensor in policy.parameters())
        rows = [row for count in steps for row in _rows(policy.with_sampler(public_sampler(count)), engines, repeats)]
    finally:
        torch.set_num_threads(before)
    return {
        "sizes": {name: value for name, value in asdict(config).items() if type(value) in (int, str)},
        "machine": machine.describe(),
        "threads": threads,
        "weights_mb": weights / 1e6,
        "peak_mb": _peak_mb(),
        "rows": rows,
    }


def _rows(policy: Any, engines: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    port = port_of(policy)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        obs = port.synthetic_observations(1)
    names = (PLAIN, *engines)
    seconds, actions = {name: list[float]() for name in names}, dict[str, Tensor]()
    title = f"{len(port.timesteps)} steps"
    for turn in progress_bar(range(repeats * len(names)), title, unit="generation", delay=1.0):
        name = names[turn % len(names)]
        if name == PLAIN:
            taken, actions[name] = _timed(policy, obs)
        else:
            with accelerate(policy, None, engine=name):
                taken, actions[name] = _timed(policy, obs)
        seconds[name].append(taken)
    plain = np.array(seconds[PLAIN])
    return [
        {
            "steps": len(port.timesteps),
            "engine": name,
            "repeats": repeats,
            "seconds": float(np.median(seconds[name])),
            "speedup": float(np.median(plain / np.array(seconds[name]))),
            "gflop": _flops(port, name) / 1e9,
            "max_difference": float((actions[name] - actions[PLAIN]).abs().max()),
            "largest_action": float(actions[PLAIN].abs().max()),
        }
        for name in names
    ]


def _timed(policy: Any, obs: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Seconds of one generation, always with the same noise, and its actions."""
    started = time.perf_counter()
    found = policy.predict_action(obs, generator=torch.Generator().manual_seed(0))
    return time.perf_counter() - started, found["action_pred"]


def _flops(port: Any, engine: str) -> int:
    """Of one generation; the engines project keys and values once."""
    shape, steps = port.sizes, len(port.timesteps)
    if engine == PLAIN:
        return int(port.encoder_flops + generation_flops(port.adapter.blocks, port.adapter.every_step, steps))
    return int(shape.folded_once + generation_flops(shape.folded_blocks, shape.folded_every_step, steps))


def _peak_mb() -> float:
    """The most memory that this process ever had, torch and Python with it."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (1e6 if sys.platform == "darwin" else 1e6 / 1024)
