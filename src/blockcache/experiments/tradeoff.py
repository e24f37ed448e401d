"""Speed against accuracy, open loop: every method timed in one interleaved run and compared with the full policy.

A method is the policy under a schedule, or under another sampler with fewer steps. Knows nothing of tasks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockcache.engines import accelerate
from blockcache.experiments.latency import Latency, measure
from blockcache.experiments.quality import ActionError, Predict, action_error, actions
from blockcache.flops import generation
from blockcache.policies import DiffusionTransformerPolicy
from blockcache.samplers import SamplerConfig
from blockcache.schedule import Schedule
from blockcache.target import examine


@dataclass(frozen=True)
class Method:
    """`schedule` None is full precision; `engine` None is the plain policy, untouched."""

    schedule: Schedule | None = None
    engine: str | None = None
    sampler: SamplerConfig | None = None


@dataclass(frozen=True, eq=False)
class Row:
    name: str
    engine: str
    latency: Latency
    speedup: float  # over the plain policy, in the same run
    flops: int
    reused: float
    error: ActionError | None  # None for the plain policy itself


@dataclass(frozen=True, eq=False)
class Tradeoff:
    rows: tuple[Row, ...]
    noise_floor: ActionError


def fewer_steps(sampler: SamplerConfig, kind: str, steps: int) -> SamplerConfig:
    """The same diffusion, drawn by another sampler in fewer steps: what a user would try first."""
    kept = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "prediction_type", "clip_sample")
    settings = {name: getattr(sampler, name) for name in kept}
    return SamplerConfig(**{**settings, "type": kind, "num_inference_steps": steps})


def tradeoff(
    policy: DiffusionTransformerPolicy,
    methods: Mapping[str, Method],
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
        running: dict[str, tuple[Predict, str, int, float]] = {}
        for name, method in methods.items():
            running[name] = _start(stack, policy, method)
        timed = {
            name: lambda predict=predict: predict(one, generator=torch.Generator().manual_seed(seed))
            for name, (predict, *_) in {"": (policy.predict_action,), **running}.items()
        }
        latency = measure(timed, repeats, progress=progress)
        note = "comparing actions" if progress else None
        full = actions(policy.predict_action, batches, seed, note)
        other = actions(policy.predict_action, batches, seed + 10_000, note)
        errors = {
            name: action_error(actions(predict, batches, seed, note), full, scale)
            for name, (predict, *_) in running.items()
        }
    rows = [Row("full precision", "eager", latency[""], 1.0, _flops(policy, None), 0.0, None)]
    rows += [
        Row(name, engine, latency[name], latency[name].over(latency[""]), flops, reused, errors[name])
        for name, (_, engine, flops, reused) in running.items()
    ]
    return Tradeoff(tuple(rows), action_error(other, full, scale))


def _start(stack: ExitStack, policy: DiffusionTransformerPolicy, method: Method) -> tuple[Predict, str, int, float]:
    """A copy of the policy, set going: its predict_action, the engine, FLOPs and reused share."""
    own = copy.deepcopy(policy)
    if method.sampler is not None:
        own = own.with_sampler(method.sampler)
    flops = _flops(own, method.schedule)
    if method.engine is None:
        return own.predict_action, "eager", flops, 0.0
    fast = stack.enter_context(accelerate(own, method.schedule, engine=method.engine))
    return own.predict_action, fast.engine, flops, 0.0 if method.schedule is None else method.schedule.reused_share


def _flops(policy: DiffusionTransformerPolicy, schedule: Schedule | None) -> int:
    target = examine(policy)
    return generation(target.adapter.blocks, target.adapter.every_step, len(target.timesteps), schedule)
