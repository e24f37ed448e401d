"""Paired closed-loop evaluation: every method meets the same episodes with the same noise.

`prepare` checks everything that can be checked and calibrates; `run` does the rollouts, in fixed groups, and gives
Results that do not depend on who ran them, how many did, or how often they were interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from blockcache._version import __version__
from blockcache.compare.candidates import Calibrations, Candidate, running
from blockcache.compare.clocks import describe_clocks
from blockcache.compare.dealing import CALIBRATION, COMPARISON, FITTING, deal_for_evaluation
from blockcache.compare.jobs import Backend, Work, one_by_one, run_jobs
from blockcache.compare.methods import FULL, Method
from blockcache.compare.paired import FLOOR, REFERENCE, Group, OpenLoop, Setting, one_thread, open_loop, play, work
from blockcache.compare.store import Outcome, Store
from blockcache.compare.widths import check_widths
from blockcache.files import PathLike, digest
from blockcache.fingerprint import Fingerprint
from blockcache.measure.latency import measure
from blockcache.measure.machine import describe
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, hash_observations, rows
from blockcache.progress import progress_bar
from blockcache.results.rollouts import (
    GENERATIONS,
    GROUP,
    PLAIN,
    Clocked,
    EvaluationError,
    Record,
    Results,
    check_alike,
    check_nothing_lost,
)
from blockcache.results.timings import Timings
from blockcache.tasks import Clock, Rollout, Task, TaskSpec, make_task
from blockcache_runtime.chunks import Watcher

MARGIN = 1.1
"""The next group of rollouts may take this much longer than the last."""


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
    clocks: Mapping[str, Clock] | None = None

    def __post_init__(self) -> None:
        for clock in (self.clocks or {}).values():  # a policy may tell less than whole chunks, which shows as it runs
            clock.check(self.setting.port.horizon - self.setting.port.executed[0])

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
        described = [(name, candidate.describe(self.setting.port)) for name, candidate in self.candidates.items()]
        check_alike(path, self.task.name, self.fingerprint, described, self._clock)

    @property
    def _clock(self) -> dict[str, Any] | None:
        return None if self.clocks is None else describe_clocks(self.clocks)

    def _group(self, name: str, seeds: tuple[int, ...]) -> Group:
        return Group(self.candidates[name], seeds, None if self.clocks is None else self.clocks[name])

    def run(self, backend: Backend = one_by_one, *, progress: bool = True) -> Results:
        """Run what the store does not hold yet, and put all of it together."""
        jobs = {self._key(job): job for job in self._jobs()}
        outcomes = run_jobs(
            partial(work, self.setting),
            jobs,
            self.store,
            backend,
            keep=_can_be_kept,
            check=lambda job, outcome: job.check(self.setting, outcome),
            progress=progress,
        )
        return self._results(lambda job: outcomes[self._key(job)])

    def run_for(
        self,
        seconds: float,
        backend: Backend = one_by_one,
        *,
        clock: Callable[[], float] = time.monotonic,
        progress: bool = True,
    ) -> Results:
        """As many groups of rollouts as the time allows, at least one of each method.

        Args:
            seconds: The time, from this call on.
            backend: Runs the rollouts.
            clock: Gives the time in seconds.
            progress: Whether to show a bar.
        """
        started, form = clock(), "{desc}: |{bar}| {n:.0f}/{total:.0f} s{postfix}"
        with progress_bar(desc="closed loop", total=seconds, bar_format=form, disable=not progress) as bar:

            def shown(work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Outcome]]:
                for finished in backend(work, jobs):
                    bar.update(min(clock() - started, seconds) - bar.n)
                    yield finished

            for count in range(self.group, len(self.seeds) + 1, self.group):
                before = clock()
                results = replace(self, seeds=self.seeds[:count]).run(shown, progress=False)
                bar.set_postfix_str(f"{count} rollouts each")
                now = clock()
                if now + MARGIN * (now - before) > started + seconds:
                    break
        return results

    def play(self, name: str, seed: int, on_frame: Callable[[Task], None], watcher: Watcher | None = None) -> Rollout:
        """The very rollout that is in the results, in its group, for somebody to watch until it is over.

        Args:
            name: The method's.
            seed: The episode's.
            on_frame: Given the simulator after the start and after every step.
            watcher: Told what is seen, planned and done.
        """
        seeds = next(group for group in self.groups if seed in group)
        place, over = seeds.index(seed), False

        def watch(tasks: Sequence[Task]) -> None:
            nonlocal over
            if not over:
                on_frame(tasks[place])
                over = tasks[place].done

        with one_thread():
            watchers = None if watcher is None else {seed: watcher}
            return play(self.setting, self._group(name, seeds), watch, watchers)[place]

    def speed(self, repeats: int, *, progress: bool = True) -> Timings:
        """All methods and the plain policy, on one torch thread, apart from the results: two runs never agree on it."""
        with one_thread():
            return speed(self.setting, self.candidates, repeats, progress=progress)

    def _jobs(self) -> list[Group | OpenLoop]:
        """Seeds before methods, so that whatever is finished first can be paired."""
        jobs: list[Group | OpenLoop] = [REFERENCE, FLOOR]
        jobs += [OpenLoop(candidate, REFERENCE.seed) for candidate in self.candidates.values()]
        return jobs + [self._group(name, seeds) for seeds in self.groups for name in self.candidates]

    def _key(self, job: Group | OpenLoop) -> str:
        port = self.setting.port
        return digest(
            {
                "made_by": __version__,
                "policy": self.fingerprint.to_dict(),
                "chunk": [port.n_obs_steps, port.n_action_steps, port.horizon],
                "task": self.task.describe(),
                **job.describe(self.setting),
            }
        )

    def _results(self, outcome: Callable[[Group | OpenLoop], Outcome]) -> Results:
        methods, floor = open_loop(self.setting, self.candidates, outcome)
        records, clocked, takes_noise = [], [], self.setting.port.takes_noise
        for name in self.candidates:
            for seeds in self.groups:
                played = outcome(self._group(name, seeds))
                records += [Record(name, **item) for item in played["records"]]
                clocked += [Clocked(name, **item) for item in played.get("clocked", ())]
        return Results(
            task={"name": self.task.name, "success": self.task.success, "max_steps": self.task.max_steps},
            policy={"source": self.source, "fingerprint": self.fingerprint.to_dict()},
            setting={
                "first_seed": self.seeds[0],
                "rollouts": len(self.seeds),
                "group": self.group,
                "noise": "keyed by rollout seed, chunk and step" if takes_noise else "keyed by group and chunk",
                "open_loop_observations": batch_size(self.setting.observations),
                "calibration": dict(self.calibration),
                **({} if self._clock is None else {"clock": self._clock}),
            },
            noise_floor=floor,
            methods=methods,
            records=tuple(records),
            clocked=tuple(clocked),
        )


def speed(setting: Setting, candidates: Mapping[str, Candidate], repeats: int, *, progress: bool = True) -> Timings:
    """Seconds per chunk of candidates and of the plain policy, batch 1, all interleaved in one run.

    Args:
        setting: The policy, and the observations, of which the first is used.
        candidates: By name.
        repeats: Interleaved rounds.
        progress: Whether to show a bar.
    """
    one = rows(setting.observations, 0, 1)
    with ExitStack() as stack:
        ready = {
            name: stack.enter_context(running(setting.port, candidate)).timed(one)
            for name, candidate in {PLAIN: Candidate(), **candidates}.items()
        }
        seconds = measure(ready, repeats, progress=progress)
    threads = torch.get_num_threads()
    how = "one torch thread" if threads == 1 else f"{threads} torch threads"
    about = f"seconds per chunk, batch 1, {how}, methods interleaved"
    return Timings(setting.port.fingerprint, describe(), about, seconds)


def prepare(
    policy: Any,
    task: str,
    methods: Sequence[Method],
    observations: Any,
    *,
    state: PathLike,
    source: str = "",
    rollouts: int = 50,
    first_seed: int | None = None,
    group: int = GROUP,
    engine: str = "auto",
    generations: int = GENERATIONS,
    make: Callable[[], Task] | None = None,
    clock: Callable[[str], Clock] | None = None,
    progress: bool = True,
) -> Evaluation:
    """Check that everything fits, calibrate where a method needs it, and choose each method's engine.

    Args:
        policy: A policy object of any known family, or its port.
        task: By name.
        methods: To be compared with the full policy, which is always among them.
        observations: A batch, dealt to purposes by `dealing.deal_for_evaluation`.
        state: The directory in which finished work is kept.
        source: Where the policy came from, for the record.
        rollouts: Episodes per method.
        first_seed: Of the episodes; the task's first test seed unless given.
        group: Episodes run as one batch.
        engine: For every method that it supports.
        generations: Observations to calibrate on.
        make: Makes a simulator, if it is not to be found by name.
        clock: Gives the clock of a method by its name; without it the simulator stops while the policy computes.
        progress: Whether to show bars.
    """
    if rollouts < 1 or group < 1:
        raise EvaluationError(f"an evaluation needs at least one rollout in groups of one, got {rollouts=}, {group=}")
    make = partial(make_task, task) if make is None else make
    probe = make()  # an unknown task or a missing simulator shows now
    spec = probe.spec
    probe.close()
    port = port_of(policy)
    fingerprint = port.fingerprint  # before the port is copied, so that the weights are hashed once
    check_widths(port, spec)
    start = spec.first_test_seed if first_seed is None else first_seed
    if start < 0:
        raise EvaluationError(f"seeds are 0 or more, got {start}")
    if not 1 <= generations < batch_size(observations):
        raise EvaluationError(
            f"{generations} generations to calibrate on leave nothing of {batch_size(observations)} observations to compare "
            "actions on; give more observations or fewer generations"
        )
    with one_thread():
        dealt = deal_for_evaluation(observations, generations)
        calibrations = Calibrations(port, dealt[CALIBRATION], keep=state, fitting=dealt.get(FITTING), progress=progress)
        found = {method.name: calibrations.candidate(method, engine) for method in (FULL, *methods)}
        # the onnx engine writes a graph for each method that it has not met before
        bar = progress_bar(found.items(), desc="preparing", unit="method", delay=2, leave=False, disable=not progress)
        candidates = {name: with_engine(port, candidate) for name, candidate in bar}
    return Evaluation(
        task=spec,
        source=source,
        fingerprint=fingerprint,
        setting=Setting(port, dealt[COMPARISON], make),
        candidates=candidates,
        seeds=tuple(range(start, start + rollouts)),
        group=group,
        calibration={
            "generations": generations,
            "seed": calibrations.seed,
            "observations": hash_observations(calibrations.observations),
        },
        store=Store(state),
        clocks=None if clock is None else {name: _clock(clock(name), found) for name, found in candidates.items()},
    )


def _clock(clock: Clock, candidate: Candidate) -> Clock:
    """A method that says how often it replans does so on the clock too."""
    replan = candidate.execution.replan
    return clock if replan is None else replace(clock, replan=replan)


def _can_be_kept(job: Group | OpenLoop, outcome: Outcome) -> bool:
    """Not a group whose simulator failed, which may do better the next time, nor one that was timed live, which will not be
    the same again."""
    live = isinstance(job, Group) and job.clock is not None and job.clock.seconds is None
    return not live and all(record["error"] is None for record in outcome.get("records", ()))


def with_engine(port: Port, candidate: Candidate) -> Candidate:
    """A candidate with the engine that really runs it instead of "auto"; a schedule that does not fit is refused here.

    Args:
        port: The policy.
        candidate: What it runs as.
    """
    if candidate.strategy is not None and not candidate.strategy.static:
        return replace(candidate, engine="patched")  # whatever engine the others run on
    with running(port, candidate) as fast:
        return replace(candidate, engine=fast.engine)
