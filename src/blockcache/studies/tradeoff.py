"""Speed against accuracy, open loop: every method timed in one interleaved run and compared with the full policy.

Knows nothing of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockcache.compare.candidates import Candidate, running
from blockcache.compare.results import EAGER, PLAIN
from blockcache.measure.action_error import ActionError, action_error, actions
from blockcache.measure.latency import Latency, measure
from blockcache.models.dpt import DiffusionTransformerPolicy


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
    policy: DiffusionTransformerPolicy,
    methods: Mapping[str, Candidate],
    observations: Tensor,
    *,
    repeats: int = 10,
    batch: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> Tradeoff:
    """Compare the methods. `observations` (N, n_obs, obs) are all used for accuracy, the first one for speed.

    Noise is the same for every method; a method with fewer steps shares the initial noise only.
    """
    one = observations[:1]
    batches = [observations[start : start + batch] for start in range(0, len(observations), batch)]
    scale = np.asarray(policy.normalizer.action.scale, dtype=np.float64)
    with ExitStack() as stack:
        started = {name: stack.enter_context(running(policy, candidate)) for name, candidate in methods.items()}
        timed = {
            name: lambda predict=predict: predict(one, generator=torch.Generator().manual_seed(seed))
            for name, predict in {
                PLAIN: policy.predict_action,
                **{name: fast.predict_action for name, fast in started.items()},
            }.items()
        }
        latency = measure(timed, repeats, progress=progress)
        note = "comparing actions" if progress else None
        full = actions(policy.predict_action, batches, seed, note)
        other = actions(policy.predict_action, batches, seed + 10_000, note)
        errors = {
            name: action_error(actions(fast.predict_action, batches, seed, note), full, scale)
            for name, fast in started.items()
        }
    rows = [MethodTradeoff("full precision", EAGER, latency[PLAIN], 1.0, Candidate().flops(policy, 0.0), 0.0, None)]
    for name, fast in started.items():
        stats = fast.stats()
        reused = 0.0 if stats is None else stats.reused_share
        flops = methods[name].flops(policy, reused)
        speedup = latency[name].over(latency[PLAIN])
        rows.append(MethodTradeoff(name, fast.engine, latency[name], speedup, flops, reused, errors[name]))
    return Tradeoff(tuple(rows), action_error(other, full, scale))
