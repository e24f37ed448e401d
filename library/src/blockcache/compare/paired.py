"""What one worker does: a group of rollouts run as one batch, or a method's actions open loop. One torch thread.

The outcome depends on nothing but the job: noise is keyed by rollout, chunk and step (by group and chunk for a policy that
draws its own), and a group is always the same batch, whoever runs it and whatever else runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.compare.candidates import Candidate, Running, running
from blockcache.compare.store import Outcome
from blockcache.errors import ContentError
from blockcache.files import Fields, Limit, read
from blockcache.fitting.clouds import seed_of
from blockcache.measure.action_error import ActionError, action_error, actions
from blockcache.measure.statistics import mean_jerk, seam_jump
from blockcache.models.port import Port
from blockcache.observations import batch_size, hash_observations, parts
from blockcache.results.rollouts import EAGER, Clocked, MethodRun, Record
from blockcache.samplers import SamplerTable, table
from blockcache.tasks import Clock, ClockedRollout, Rollout, Task, clocked_rollout, rollout
from blockcache.tasks.clock import ActOnClock
from blockcache.tasks.rollout import Act
from blockcache_runtime.chunks import Previous, Watcher

OPEN_LOOP_BATCH = 16
_PLAYED = Fields({"records": list[dict[str, Any]], "seconds": float}, {"clocked": list[dict[str, Any]]})
_ACTED = Fields({"actions": list[list[list[float]]], "reused": Annotated[float, Limit(0, 1)]})


@dataclass(frozen=True, eq=False)
class Setting:
    """What all jobs of an evaluation share. `observations` is the batch compared open loop; rollouts need a task."""

    port: Port
    observations: Any
    make_task: Callable[[], Task] | None = None


@dataclass(frozen=True)
class Group:
    """Rollouts of one candidate, one for each seed, in one batch."""

    candidate: Candidate
    seeds: tuple[int, ...]
    clock: Clock | None = None

    def describe(self, setting: Setting) -> dict[str, Any]:
        clock = {} if self.clock is None else {"clock": self.clock.describe()}
        return {"rollouts": list(self.seeds), "method": self.candidate.describe(setting.port), **clock}

    def run(self, setting: Setting) -> Outcome:
        started = time.perf_counter()
        done = play(setting, self)
        executed = self.candidate.execution.replan or setting.port.n_action_steps
        records = [_record(item, setting.port.action_scale, executed) for item in done]
        clocked = [_clocked(item) for item in done if isinstance(item, ClockedRollout)]
        return {
            "records": records,
            "seconds": round(time.perf_counter() - started, 3),
            **({} if self.clock is None else {"clocked": clocked}),
        }

    def check(self, setting: Setting, outcome: Outcome) -> None:
        """Refuse what is not the outcome of this job."""
        read(_PLAYED, outcome)
        records = read(list[Record], [{"method": "", **item} for item in outcome["records"]], "records")
        clocked = read(list[Clocked], [{"method": "", **item} for item in outcome.get("clocked", ())], "clocked")
        for found in (records, clocked) if self.clock is not None else (records,):
            if tuple(record.seed for record in found) != self.seeds:
                raise ContentError("its rollouts are of other seeds")


@dataclass(frozen=True)
class OpenLoop:
    """Actions of one candidate on the observations of the open-loop comparison."""

    candidate: Candidate
    seed: int

    def describe(self, setting: Setting) -> dict[str, Any]:
        seen = hash_observations(setting.observations)
        return {"open_loop": seen, "seed": self.seed, "method": self.candidate.describe(setting.port)}

    def run(self, setting: Setting) -> Outcome:
        with running(setting.port, self.candidate) as fast:
            found = actions(fast.act, parts(setting.observations, OPEN_LOOP_BATCH), self.seed)
            stats = fast.stats()
        return {"actions": found.tolist(), "reused": 0.0 if stats is None else stats.reused_share}

    def check(self, setting: Setting, outcome: Outcome) -> None:
        """Refuse what is not the outcome of this job."""
        read(_ACTED, outcome)
        expected = (batch_size(setting.observations), setting.port.n_action_steps, len(setting.port.action_scale))
        if (shape := np.asarray(outcome["actions"]).shape) != expected:
            raise ContentError(f"its actions have shape {shape}, expected {expected}")


REFERENCE, FLOOR = OpenLoop(Candidate(), seed=0), OpenLoop(Candidate(), seed=10_000)
"""The plain policy, and once more with other noise."""


def open_loop(
    setting: Setting, candidates: Mapping[str, Candidate], outcome: Callable[[OpenLoop], Outcome]
) -> tuple[tuple[MethodRun, ...], ActionError]:
    """How far each candidate's actions are from the plain policy's, and the policy's own with other noise.

    Args:
        setting: The policy, and the observations that actions are compared on.
        candidates: By name.
        outcome: Gives what a job gave.
    """
    port, reference = setting.port, np.asarray(outcome(REFERENCE)["actions"])

    def error(found: Outcome) -> ActionError:
        return action_error(np.asarray(found["actions"]), reference, port.action_scale)

    runs = []
    for name, candidate in candidates.items():
        found = outcome(OpenLoop(candidate, REFERENCE.seed))
        runs.append(
            MethodRun(
                name=name,
                **candidate.describe(port) | {"engine": candidate.engine or EAGER},
                shares_all_noise=candidate.shares_all_noise(port),
                flops=candidate.flops(port, found["reused"]),
                reused=found["reused"],
                error=error(found),
            )
        )
    return tuple(runs), error(outcome(FLOOR))


def work(setting: Setting, job: Group | OpenLoop) -> Outcome:
    """Run one job, on one thread.

    Args:
        setting: What all jobs share.
        job: Which one.
    """
    with one_thread():
        return job.run(setting)


def play(
    setting: Setting,
    group: Group,
    on_step: Callable[[Sequence[Task]], None] | None = None,
    watchers: Mapping[int, Watcher] | None = None,
) -> tuple[Rollout, ...]:
    """The rollouts of a group.

    Args:
        setting: The policy, and what makes a simulator.
        group: Of which method and which seeds.
        on_step: Sees the simulators as they go.
        watchers: By seed, told what is planned and done.
    """
    clock, seeds, make = group.clock, group.seeds, setting.make_task
    assert make is not None
    shared: dict[str, Any] = {"n_obs_steps": setting.port.n_obs_steps, "on_step": on_step, "watchers": watchers}
    with running(setting.port, group.candidate, rtc=clock is not None and clock.rtc) as fast:
        if clock is not None:
            return clocked_rollout(make, _answer(fast, seeds), seeds, clock, **shared)
        executed = fast.execution.replan or setting.port.n_action_steps
        return rollout(make, _act(fast, seeds), seeds, n_action_steps=executed, **shared)


def _act(fast: Running, seeds: Sequence[int]) -> Act:
    """Each rollout's noise is its own, whatever batch it is in. A policy that draws its noise itself is seeded by group and
    chunk, so that every method gets the same."""

    def act(obs: Any, chunk: int) -> NDArray[np.float64]:
        noise = _noise(fast, seeds, [chunk] * len(seeds))
        seed = seed_of(*seeds, chunk) if noise is None else 0
        if fast.execution.replan is None:
            return fast.act(obs, seed, noise)
        return fast.chunk(obs, None, noise, seed)[:, : fast.execution.replan]

    return act


def _noise(fast: Running, seeds: Sequence[int], chunks: Sequence[int]) -> Tensor | None:
    """That of one chunk of each rollout, for every candidate; None for a policy that draws its noise itself."""
    if not fast.port.takes_noise:
        return None
    assert fast.port.sampler is not None  # a policy that takes noise has one that we know
    sampler, shape = table(fast.port.sampler), (fast.port.horizon, fast.port.sample_dim)
    drawn = [
        rollout_noise([seed], chunk, sampler, shape, candidate)
        for seed, chunk in zip(seeds, chunks, strict=True)
        for candidate in range(fast.execution.candidates)
    ]
    return torch.from_numpy(np.concatenate(drawn, axis=1))


def _answer(fast: Running, seeds: Sequence[int]) -> ActOnClock:
    """Noise is keyed as in other rollouts; the episodes that ask at one tick are a batch."""

    def answer(
        obs: Any, places: Sequence[int], chunks: Sequence[int], previous: Previous | None
    ) -> NDArray[np.float64]:
        asking = [seeds[place] for place in places]
        noise = _noise(fast, asking, chunks)
        return fast.chunk(obs, previous, noise, seed_of(*asking, *chunks) if noise is None else 0)

    return answer


def rollout_noise(
    seeds: Sequence[int], chunk: int, sampler: SamplerTable, shape: tuple[int, int], candidate: int = 0
) -> NDArray[np.float32]:
    """(1 + draws, B, T, D): the noise of one chunk of each rollout, a function of (seed, chunk, step, candidate) alone.

    The start is the same for every sampler. A step's noise belongs to a sampler of that many steps: step 5 of 50 is
    another moment than step 5 of 100.

    Args:
        seeds: Of the rollouts.
        chunk: Its place in each of them.
        sampler: Decides how many steps draw.
        shape: (T, D) of one chunk.
        candidate: Among several for one chunk; the first has the noise of a chunk that is drawn alone.
    """
    steps = len(sampler.timesteps)
    noise = np.empty((1 + sampler.draw_count, len(seeds), *shape), dtype=np.float32)
    for place, seed in enumerate(seeds):
        start = np.random.default_rng((seed, chunk, 0, candidate) if candidate else (seed, chunk))
        noise[0, place] = start.standard_normal(shape, dtype=np.float32)
        # drawn step by step from one stream, so that a step's noise does not depend on how many follow
        rng = np.random.default_rng((seed, chunk, steps, candidate) if candidate else (seed, chunk, steps))
        noise[1:, place] = rng.standard_normal((sampler.draw_count, *shape), dtype=np.float32)
    return noise


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums come out the same on every machine of a kind, however many cores it has, and workers do not fight."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _clocked(done: ClockedRollout) -> dict[str, Any]:
    counters = done.counters
    acting = counters.ticks - counters.waiting
    return {
        "seed": done.seed,
        "stale": counters.stale / acting if acting else None,
        "held": counters.held,
        "missed": counters.missed,
        "first_action": done.first_action,
        "action_hz": done.action_hz,
    }


def _record(done: Rollout, scale: NDArray[np.float64], chunk: int) -> dict[str, Any]:
    moved = done.actions * scale  # normalised units
    seams = done.seams if isinstance(done, ClockedRollout) else range(chunk, len(moved), chunk)
    return {
        "seed": done.seed,
        "score": None if done.score is None else float(done.score),
        "success": None if done.success is None else bool(done.success),
        "steps": done.steps,
        "error": done.error,
        "jerk": mean_jerk(moved),
        "jump": seam_jump(moved, seams),
    }
