"""Paired closed-loop evaluation: every method meets the same episodes with the same noise.

`prepare` checks everything that can be checked and calibrates; `run` does the rollouts, in fixed groups, and gives
Results that do not depend on who ran them, how many did, or how often they were interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from blockcache._version import __version__
from blockcache.compare.candidates import Calibrations, Candidate, digest, hash_observations, running
from blockcache.compare.jobs import Backend, EvaluationError, Outcome, Store, one_by_one, run_jobs
from blockcache.compare.methods import FULL, parse_method
from blockcache.compare.paired import Group, OpenLoop, Setting, one_thread, play, work
from blockcache.compare.results import (
    GENERATIONS,
    GROUP,
    PLAIN,
    TIMINGS_FORMAT,
    MethodRun,
    OpenLoopError,
    Record,
    Results,
    check_alike,
    check_nothing_lost,
)
from blockcache.errors import TaskError
from blockcache.files import PathLike
from blockcache.fingerprint import Fingerprint
from blockcache.measure.action_error import action_error
from blockcache.measure.latency import Latency, measure
from blockcache.measure.machine import describe
from blockcache.models.dpt import DiffusionTransformerPolicy
from blockcache.models.port import examine
from blockcache.solvers.teacache import Rule
from blockcache.tasks import Rollout, Task, TaskSpec, make_task

OPEN_LOOP = 32  # observations, at most
_REFERENCE, _FLOOR = OpenLoop(Candidate(), seed=0), OpenLoop(Candidate(), seed=10_000)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An evaluation that is ready to run. `candidates` go by the names of their methods, the full policy first."""

    task: TaskSpec
    source: str
    fingerprint: Fingerprint
    setting: Setting
    candidates: Mapping[str, Candidate]
    seeds: tuple[int, ...]
    group: int
    calibration: Mapping[str, Any]
    store: Store

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.seeds[start : start + self.group] for start in range(0, len(self.seeds), self.group))

    @property
    def rollouts(self) -> set[tuple[str, int]]:
        """What there will be a record of: method and seed."""
        return {(name, seed) for name in self.candidates for seed in self.seeds}

    def check_output(self, path: PathLike) -> None:
        """Refuse a results file that this evaluation would not merely bring up to date."""
        self.check_alike(path)
        check_nothing_lost(path, self.rollouts)

    def check_alike(self, path: PathLike) -> None:
        """Refuse a results file of another task or policy, or of another schedule under the same name."""
        described = [(name, candidate.describe(self.setting.policy)) for name, candidate in self.candidates.items()]
        check_alike(path, self.task.name, self.fingerprint, described)

    def run(self, backend: Backend = one_by_one, *, progress: bool = True) -> Results:
        """Run what the store does not hold yet, and put all of it together."""
        jobs = {self._key(job): job for job in self._jobs()}
        outcomes = run_jobs(partial(work, self.setting), jobs, self.store, backend, keep=_went_well, progress=progress)
        return self._results(lambda job: outcomes[self._key(job)])

    def play(self, name: str, seed: int, on_frame: Callable[[Task], None]) -> Rollout:
        """The very rollout that is in the results, in its group, for somebody to watch until it is over."""
        seeds = next(group for group in self.groups if seed in group)
        place, over = seeds.index(seed), False

        def watch(tasks: Sequence[Task]) -> None:
            nonlocal over
            if not over:
                on_frame(tasks[place])
                over = tasks[place].done

        with one_thread():
            return play(self.setting, Group(self.candidates[name], seeds), watch)[place]

    def speed(self, repeats: int, *, progress: bool = True) -> dict[str, Latency]:
        """Seconds per chunk: batch 1, one torch thread, all methods and the plain policy interleaved in one run."""
        policy, one = self.setting.policy, self.setting.observations[:1]
        with ExitStack() as stack:
            stack.enter_context(one_thread())
            timed = {}
            for name, candidate in {PLAIN: Candidate(), **self.candidates}.items():
                fast = stack.enter_context(running(policy, candidate))
                timed[name] = partial(_generate, fast.predict_action, one)
            return measure(timed, repeats, progress=progress)

    def _jobs(self) -> list[Group | OpenLoop]:
        """Seeds before methods, so that whatever is finished first can be paired."""
        jobs: list[Group | OpenLoop] = [_REFERENCE, _FLOOR]
        jobs += [OpenLoop(candidate, _REFERENCE.seed) for candidate in self.candidates.values()]
        return jobs + [Group(candidate, seeds) for seeds in self.groups for candidate in self.candidates.values()]

    def _key(self, job: Group | OpenLoop) -> str:
        config = self.setting.policy.config
        return digest(
            {
                "made_by": __version__,
                "policy": self.fingerprint.to_dict(),
                "chunk": [config.n_obs_steps, config.n_action_steps, config.horizon],
                "task": asdict(self.task),
                **job.describe(self.setting),
            }
        )

    def _results(self, outcome: Callable[[Group | OpenLoop], Outcome]) -> Results:
        policy = self.setting.policy
        scale = np.asarray(policy.normalizer.action.scale, dtype=np.float64)
        reference = np.asarray(outcome(_REFERENCE)["actions"])

        def error(job: OpenLoop) -> OpenLoopError:
            found = action_error(np.asarray(outcome(job)["actions"]), reference, scale)
            return OpenLoopError(found.mean, found.first_p95)

        methods, records = [], []
        for name, candidate in self.candidates.items():
            job = OpenLoop(candidate, _REFERENCE.seed)
            reused = outcome(job)["reused"]
            methods.append(
                MethodRun(
                    name=name,
                    **candidate.describe(policy),
                    shares_all_noise=candidate.under(policy).sampler == policy.sampler,
                    flops=candidate.flops(policy, reused),
                    reused=reused,
                    error=error(job),
                )
            )
            for seeds in self.groups:
                records += [Record(name, **item) for item in outcome(Group(candidate, seeds))["records"]]
        return Results(
            task={"name": self.task.name, "success": self.task.success, "max_steps": self.task.max_steps},
            policy={"source": self.source, "fingerprint": self.fingerprint.to_dict()},
            setting={
                "first_seed": self.seeds[0],
                "rollouts": len(self.seeds),
                "group": self.group,
                "noise": "keyed by rollout seed, chunk and step",
                "open_loop_observations": len(self.setting.observations),
                "calibration": dict(self.calibration),
            },
            noise_floor=error(_FLOOR),
            methods=tuple(methods),
            records=tuple(records),
        )


def prepare(
    policy: DiffusionTransformerPolicy,
    task: str,
    methods: Sequence[str],
    observations: Tensor,
    *,
    state: PathLike,
    source: str = "",
    rollouts: int = 50,
    first_seed: int | None = None,
    group: int = GROUP,
    engine: str = "auto",
    generations: int = GENERATIONS,
    make: Callable[[], Task] | None = None,
    progress: bool = True,
) -> Evaluation:
    """Check that everything fits, calibrate where a method needs it, and settle each method's engine.

    `observations` (N, n_obs, obs): the first `generations` to calibrate on, others for the open-loop comparison. `state`
    is the directory in which finished work is kept. `make` makes a simulator, if it is not to be found by name. The full
    policy is always among the methods: it is what the others are compared with.
    """
    if rollouts < 1 or group < 1:
        raise EvaluationError(f"an evaluation needs at least one rollout in groups of one, got {rollouts=}, {group=}")
    parsed = {method.name: method for method in (FULL, *map(parse_method, methods))}
    make = partial(make_task, task) if make is None else make
    probe = make()  # an unknown task or a missing simulator shows now
    spec = probe.spec
    probe.close()
    _check_widths(policy, spec)
    start = spec.first_test_seed if first_seed is None else first_seed
    if start < 0:
        raise EvaluationError(f"seeds are 0 or more, got {start}")
    if not 1 <= generations < len(observations):
        raise EvaluationError(
            f"{generations} generations to calibrate on leave nothing of {len(observations)} observations to compare "
            "actions on; give more observations or fewer generations"
        )
    with one_thread():
        calibrations = Calibrations(policy, observations[:generations], keep=state, progress=progress)
        found = {name: calibrations.candidate(method, engine) for name, method in parsed.items()}
        # the onnx engine writes a graph for each method that it has not met before
        bar = tqdm(found.items(), desc="preparing", unit="method", delay=2, leave=False, disable=not progress)
        candidates = {name: _settled(policy, candidate) for name, candidate in bar}
    return Evaluation(
        task=spec,
        source=source,
        fingerprint=examine(policy).fingerprint,
        setting=Setting(policy, make, observations[generations : generations + OPEN_LOOP].clone()),
        candidates=candidates,
        seeds=tuple(range(start, start + rollouts)),
        group=group,
        calibration={
            "generations": generations,
            "seed": calibrations.seed,
            "observations": hash_observations(calibrations.observations),
        },
        store=Store(state),
    )


def _went_well(outcome: Outcome) -> bool:
    """A simulator that failed may do better the next time, so such a group is not kept."""
    return all(record["error"] is None for record in outcome.get("records", ()))


def _settled(policy: DiffusionTransformerPolicy, candidate: Candidate) -> Candidate:
    """With the engine that really runs it instead of "auto"; a schedule that does not fit is refused here."""
    if isinstance(candidate.schedule, Rule):
        return replace(candidate, engine="patched")  # whatever engine the others run on
    with running(policy, candidate) as fast:
        return replace(candidate, engine=fast.engine)


def _check_widths(policy: DiffusionTransformerPolicy, spec: TaskSpec) -> None:
    for what, has, needs in (
        ("observations", policy.obs_dim, spec.obs_dim),
        ("actions", policy.action_dim, spec.action_dim),
    ):
        if has != needs:
            raise TaskError(
                f"the policy does not fit task {spec.name}: its {what} have {has} numbers, the task's {needs}; "
                "was it trained for another task?"
            )


def _generate(predict_action: Callable[..., Any], obs: Tensor) -> None:
    predict_action(obs, generator=torch.Generator().manual_seed(0))


def save_timings(path: PathLike, speed: Mapping[str, Latency], policy: Fingerprint) -> None:
    """What was timed, apart from the results: two runs never agree on it."""
    seconds = {
        name: {f"p{percent}": latency.percentile(percent) for percent in (50, 95, 99)}
        | {"seconds": latency.seconds.tolist()}
        for name, latency in speed.items()
    }
    setting = "seconds per chunk, batch 1, one torch thread, methods interleaved"
    about = {"policy": policy.to_dict(), "machine": describe(), "setting": setting}
    TIMINGS_FORMAT.save(path, {**about, "methods": seconds})
