"""Candidates: methods made ready for one policy, and set going. What is compared, timed and rolled out.

Knows nothing of tasks.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache._version import __version__
from blockcache.attach.recorder import calibrate
from blockcache.compare.methods import Method, MethodError, ScheduleFile, TeaCache
from blockcache.engines import Stats, accelerate
from blockcache.files import PathLike, make_directory
from blockcache.measure.action_error import Predict
from blockcache.models.dpt import DiffusionTransformerPolicy
from blockcache.models.port import examine
from blockcache.samplers import SamplerConfig
from blockcache.schedule import Schedule
from blockcache.schedule.cost import generation
from blockcache.solvers import solve
from blockcache.solvers.recording import Recording
from blockcache.solvers.teacache import Rule, fit_teacache


@dataclass(frozen=True)
class Candidate:
    """`sampler` None is the policy's own, `engine` None is the plain policy, untouched."""

    schedule: Schedule | Rule | None = None
    engine: str | None = None
    sampler: SamplerConfig | None = None

    def __post_init__(self) -> None:
        if self.engine is None and self.schedule is not None:
            raise MethodError("the plain policy follows no schedule; name an engine, such as auto")

    def under(self, policy: DiffusionTransformerPolicy) -> DiffusionTransformerPolicy:
        """The policy with the candidate's sampler; weights are shared."""
        return policy if self.sampler is None else policy.with_sampler(self.sampler)

    def flops(self, policy: DiffusionTransformerPolicy, reused: float) -> int:
        """FLOPs of one generation by formula; `reused`, as measured, counts for TeaCache only: it decides as it runs."""
        target = examine(self.under(policy))
        blocks, every_step, steps = target.adapter.blocks, target.adapter.every_step, len(target.timesteps)
        if isinstance(self.schedule, Rule):
            return round(steps * (every_step + (1 - reused) * sum(block.cost for block in blocks)))
        return generation(blocks, every_step, steps, self.schedule)

    def describe(self, policy: DiffusionTransformerPolicy) -> dict[str, Any]:
        """All that decides the actions besides the weights, in JSON types."""
        reuse: dict[str, Any] | None = None
        if isinstance(self.schedule, Schedule):
            reuse = {"updates": {name: list(steps) for name, steps in self.schedule.updates.items()}}
        elif isinstance(self.schedule, Rule):
            reuse = {"coefficients": list(self.schedule.coefficients), "threshold": self.schedule.threshold}
        return {"engine": self.engine, "sampler": self.under(policy).sampler.to_dict(), "reuse": reuse}


@dataclass(frozen=True, eq=False)
class Running:
    """A candidate at work, on its own copy of the policy. The plain policy counts nothing."""

    policy: DiffusionTransformerPolicy
    engine: str
    stats: Callable[[], Stats | None]

    @property
    def predict_action(self) -> Predict:
        return self.policy.predict_action


@contextmanager
def running(policy: DiffusionTransformerPolicy, candidate: Candidate) -> Iterator[Running]:
    """Set a candidate going on a copy of the policy, so that several can run side by side.

    Whatever the engine, it gets as many threads as torch has, so that figures can be compared.
    """
    own = candidate.under(copy.deepcopy(policy))
    if candidate.engine is None:
        yield Running(own, "eager", lambda: None)
        return
    with accelerate(own, candidate.schedule, engine=candidate.engine, threads=torch.get_num_threads()) as fast:
        yield Running(own, fast.engine, fast.stats)


def fewer_steps(sampler: SamplerConfig, kind: str, steps: int) -> SamplerConfig:
    """The same diffusion, drawn by another sampler in fewer steps: what a user would try first.

    The steps are spaced as diffusers does by default, whatever the policy's own spacing: not every spacing can have
    every number of steps.
    """
    kept = ["num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "prediction_type"]
    kept += ["clip_sample", "clip_sample_range"]
    if kind == sampler.type == "ddpm":
        kept.append("variance_type")
    settings = {name: getattr(sampler, name) for name in kept}
    return SamplerConfig(**{**settings, "type": kind, "num_inference_steps": steps})


class Calibrations:
    """Recordings of one policy: one for each sampler, made when a method first needs it.

    With a directory to `keep` them in, each is made once and read from there the next time.
    """

    def __init__(
        self,
        policy: DiffusionTransformerPolicy,
        observations: Tensor,
        *,
        seed: int = 0,
        keep: PathLike | None = None,
        progress: bool = True,
    ) -> None:
        self.policy = policy
        self.observations = observations  # (N, n_obs, obs): one generation each
        self.seed = seed
        self._keep = None if keep is None else Path(keep)
        self._progress = progress
        self._made: dict[SamplerConfig, Recording] = {}

    def candidate(self, method: Method, engine: str | None = "auto") -> Candidate:
        """Solve or read what the method follows."""
        own = self.policy.sampler
        sampler = own if method.sampler is None else fewer_steps(own, method.sampler.kind, method.sampler.steps)
        return Candidate(self._schedule(method, sampler), engine, None if method.sampler is None else sampler)

    def recording(self, sampler: SamplerConfig) -> Recording:
        if sampler not in self._made:
            self._made[sampler] = self._recording(self.policy.with_sampler(sampler))
        return self._made[sampler]

    def _schedule(self, method: Method, sampler: SamplerConfig) -> Schedule | Rule | None:
        wanted = method.reuse
        if wanted is None:
            return None
        if isinstance(wanted, ScheduleFile):
            return Schedule.load(wanted.path)
        if isinstance(wanted, TeaCache):
            return fit_teacache(self.recording(sampler), wanted.threshold)
        return solve(
            self.recording(sampler), wanted.updates, wanted.union, wanted.metric, wanted.method, wanted.objective
        )

    def _recording(self, policy: DiffusionTransformerPolicy) -> Recording:
        file = None if self._keep is None else self._keep / f"recording-{self._digest(policy)[:16]}.safetensors"
        if file is not None and file.exists():
            return Recording.load(file)
        made = calibrate(policy, [obs[None] for obs in self.observations], seed=self.seed, progress=self._progress)
        if file is not None:
            make_directory(file.parent)
            made.save(file)
        return made

    def _digest(self, policy: DiffusionTransformerPolicy) -> str:
        seen, fingerprint = hash_observations(self.observations), examine(policy).fingerprint.to_dict()
        return digest({"made_by": __version__, "policy": fingerprint, "observations": seen, "seed": self.seed})


def hash_observations(observations: Tensor) -> str:
    array = np.ascontiguousarray(observations.numpy())
    return digest({"shape": list(array.shape), "bytes": hashlib.sha256(array.tobytes()).hexdigest()})


def digest(value: Mapping[str, Any]) -> str:
    """One name for a JSON value, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()
