"""Caching error and action error of every method at several S, from one calibration. Reported whichever way it falls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.analysis import caching_error
from blockcache.attach.recorder import calibrate
from blockcache.compare.results import GENERATIONS
from blockcache.engines import accelerate
from blockcache.errors import ObservationError
from blockcache.files import Format
from blockcache.measure import machine
from blockcache.measure.action_error import action_error, actions
from blockcache.models.dpt import DiffusionTransformerPolicy
from blockcache.models.port import examine
from blockcache.schedule.cost import generation
from blockcache.solvers import METHODS, solve

FORMAT = Format(
    "blockcache.caching",
    "file of caching errors",
    dict.fromkeys(("machine", "calibration", "noise_floor"), dict)
    | {"command": str, "threads": int, "observations": int, "rows": list},
    optional=("made_by",),
)


def caching_study(
    policy: DiffusionTransformerPolicy,
    observations: Tensor,
    *,
    command: str,
    generations: int = GENERATIONS,
    updates: tuple[int, ...] = (5, 10, 20),
    batch: int = 16,
    progress: bool = True,
) -> dict[str, Any]:
    """Calibrate on the first observations, compare on the others; all methods see the same noise. For `FORMAT.save`.

    `command` is what somebody typed for it, for the record.
    """
    if not 1 <= generations < len(observations):
        raise ObservationError(
            f"{generations} generations to calibrate on leave nothing of {len(observations)} observations to compare on; "
            "give more observations or fewer generations"
        )
    recording = calibrate(policy, [one[None] for one in observations[:generations]], progress=progress)
    held = observations[generations:]
    batches = [held[start : start + batch] for start in range(0, len(held), batch)]
    scale = np.asarray(policy.normalizer.action.scale, dtype=np.float64)
    note = "full precision" if progress else None
    full = actions(policy.predict_action, batches, seed=0, progress=note)
    floor = action_error(actions(policy.predict_action, batches, seed=10_000, progress=note), full, scale)
    adapter = examine(policy).adapter
    rows = []
    for count in updates:
        for method in reversed(METHODS):
            schedule = solve(recording, updates=count, union=5, method=method)
            name = f"{method}, S = {count}"
            caching = caching_error(policy, schedule, batches, progress=name if progress else None)
            with accelerate(policy, schedule, engine="loop") as fast:
                error = action_error(actions(fast.predict_action, batches, seed=0), full, scale)
            rows.append(
                {
                    "method": method,
                    "updates": count,
                    "gflop": generation(adapter.blocks, adapter.every_step, recording.steps, schedule) / 1e9,
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
        "observations": len(held),
        "noise_floor": {"action_error": floor.mean, "first_action_p95": floor.first_p95},
        "rows": rows,
    }
