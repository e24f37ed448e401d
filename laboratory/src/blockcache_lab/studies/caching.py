"""Caching error and action error of every method at several S, from one calibration. Reported whichever way it falls."""

from __future__ import annotations

from typing import Any

import torch

from blockcache.attach.recorder import calibrate
from blockcache.compare.candidates import Candidate, running
from blockcache.errors import ObservationError
from blockcache.measure import machine
from blockcache.measure.action_error import action_error, actions
from blockcache.models.port import Port
from blockcache.observations import batch_size, parts, rows
from blockcache.results.rollouts import GENERATIONS
from blockcache.schedule import generation_flops
from blockcache.solvers import PAPER_METHODS, solve
from blockcache_lab.analysis.caching import caching_error


def caching_study(
    port: Port,
    observations: Any,
    *,
    command: str,
    generations: int = GENERATIONS,
    updates: tuple[int, ...] = (5, 10, 20),
    batch: int = 16,
    progress: bool = True,
) -> dict[str, Any]:
    """Calibrate on the first observations, compare on the others; all methods see the same noise.

    observations  a batch; the first `generations` are calibrated on
    command       what somebody typed for it, for the record
    updates       the numbers of update steps to compare
    batch         observations run at once
    """
    total = batch_size(observations)
    if not 1 <= generations < total:
        raise ObservationError(
            f"{generations} generations to calibrate on leave nothing of {total} observations to compare on; "
            "give more observations or fewer generations"
        )
    seen = [port.prepare_observation(one) for one in parts(rows(observations, 0, generations), 1)]
    recording = calibrate(port, seen, progress=progress)
    batches = parts(rows(observations, generations, total), batch)
    scale, adapter, note = port.action_scale, port.adapter, "full precision" if progress else None
    with running(port, Candidate()) as plain:
        full = actions(plain.act, batches, seed=0, progress=note)
        floor = action_error(actions(plain.act, batches, seed=10_000, progress=note), full, scale)
    found = []
    for count in updates:
        for method in reversed(PAPER_METHODS):
            schedule = solve(recording, updates=count, method=method)
            name = f"{method}, S = {count}"
            caching = caching_error(port, schedule, batches, progress=name if progress else None)
            with running(port, Candidate(schedule, "loop")) as fast:
                error = action_error(actions(fast.act, batches, seed=0), full, scale)
            found.append(
                {
                    "method": method,
                    "updates": count,
                    "gflop": (
                        port.encoder_flops
                        + generation_flops(adapter.blocks, adapter.every_step, recording.steps, schedule)
                    )
                    / 1e9,
                    "caching_error": float(caching.errors.mean()),
                    "update_induced": caching.update_induced,
                    "reuse_induced": caching.reuse_induced,
                    "per_block": {name: float(v) for name, v in zip(caching.blocks, caching.per_block, strict=True)},
                    "action_error": error.mean,
                    "first_action_p95": error.first_p95,
                }
            )
    return {
        "command": command,
        "machine": machine.describe(),
        "threads": torch.get_num_threads(),
        "calibration": {"generations": recording.generations, "seconds": recording.origin["seconds"]},
        "observations": total - generations,
        "noise_floor": {"action_error": floor.mean, "first_action_p95": floor.first_p95},
        "rows": found,
    }
