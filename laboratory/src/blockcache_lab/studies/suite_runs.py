"""Running a suite: choose methods by their FLOPs, evaluate them, put it all into one results file.

All suites of a directory share one store of finished rollouts, so a method that is in two suites runs once. Suite realtime
has a file for each delay and mode. A delay counts in control ticks: how long a chunk takes and how fast the robot is
controlled decide no more than how many ticks it is late, so engines that draw the same actions share a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blockcache.compare.candidates import Calibrations, Candidate, running
from blockcache.compare.clocks import choose_clock
from blockcache.compare.dealing import CALIBRATION, deal_for_evaluation
from blockcache.compare.evaluation import Evaluation, prepare
from blockcache.compare.jobs import Backend, one_by_one
from blockcache.compare.methods import parse_method
from blockcache.compare.paired import OpenLoop, Setting, one_thread
from blockcache.errors import FitError
from blockcache.files import PathLike, exists
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.features import Chunks, action_features
from blockcache.models.port import Port
from blockcache.observations import rows
from blockcache.results.rollouts import (
    BASELINE,
    FRESH_SEEDS,
    GENERATIONS,
    GROUP,
    EvaluationError,
    Results,
    check_nothing_lost,
)
from blockcache.results.timings import Timings
from blockcache.tasks import Clock, Task, make_task, task_spec
from blockcache.tasks.variants import Changed, Variant
from blockcache_lab.studies.equal_flops import engine_flops, equal_flops
from blockcache_lab.studies.open_loop import ExactSavings, OpenLoopFacts
from blockcache_lab.studies.suites import (
    DELAYS,
    KINDS,
    MODES,
    RATE,
    REALTIME,
    SUITES,
    Cell,
    Suite,
    suite_by_name,
    suite_of,
    with_tuned,
)


@dataclass(frozen=True)
class RolloutCounts:
    """How much is run: rollouts of a method and of the main ones, how many of them as one batch, and what to calibrate
    on. Episodes that are cut short (`max_steps`) show that everything works, and nothing else."""

    rollouts: int = 50
    main_rollouts: int = 250
    group: int = GROUP
    generations: int = GENERATIONS
    max_steps: int | None = None

    @property
    def quick(self) -> bool:
        return self.max_steps is not None

    def of(self, cell: Cell) -> int:
        return max(self.rollouts, self.main_rollouts) if cell.main else self.rollouts


FEATURE_OBSERVATIONS, FEATURE_SAMPLES = 20, 16  # of what methods do to actions: seconds for a small policy
QUICK = RolloutCounts(rollouts=2, main_rollouts=4, group=2, generations=4, max_steps=24)


@dataclass(frozen=True, eq=False)
class SuiteSetting:
    """What all suites of one directory share; `state` keeps what is finished. See `evaluation.prepare`.

    Args:
        tuned: A directory of `blockcache tune`, to be compared too.
    """

    port: Port
    task: str
    observations: Any
    state: PathLike
    counts: RolloutCounts = RolloutCounts()
    source: str = ""
    engine: str = "auto"
    make: Callable[[], Task] | None = None
    first_seed: int | None = None
    tuned: str | None = None
    progress: bool = True

    def for_suite(self, name: str, tuned: str | None = None) -> SuiteSetting:
        """The setting of one suite. One with a directory of its own has fresh seeds, on which no method was chosen."""
        if not KINDS[name].alone:
            return self
        return replace(self, first_seed=task_spec(self.task).first_test_seed + FRESH_SEEDS, tuned=tuned)

    def evaluation(self, methods: Sequence[str], rollouts: int) -> Evaluation:
        make = partial(make_task, self.task) if self.make is None else self.make
        if self.counts.max_steps is not None:
            make = partial(shortened, make, self.counts.max_steps)
        return prepare(
            self.port,
            self.task,
            list(map(parse_method, methods)),
            self.observations if not self.counts.quick else rows(self.observations, 0, self.counts.generations + 4),
            state=self.state,
            source=self.source,
            rollouts=rollouts,
            first_seed=self.first_seed,
            group=self.counts.group,
            engine=self.engine,
            generations=self.counts.generations,
            make=make,
            progress=self.progress,
        )

    def suites(self, names: Iterable[str]) -> list[Suite]:
        """Suites by name, their methods chosen. The calibration is the one that `prepare` will find in the store."""
        self.evaluation((), 1)  # refuses what does not fit before anything takes long
        seen = deal_for_evaluation(self.observations, self.counts.generations)[CALIBRATION]
        equal = equal_flops(Calibrations(self.port, seen, keep=self.state, progress=self.progress))
        found = [suite_by_name(name, equal, self.counts.quick) for name in names]
        return found if self.tuned is None else [with_tuned(suite, self.tuned) for suite in found]


@dataclass(frozen=True, eq=False)
class SuiteRun:
    """A suite that is ready to run. The evaluations differ in how many rollouts they have, the most come first."""

    suite: Suite
    evaluations: tuple[Evaluation, ...]

    def check_output(self, path: PathLike) -> None:
        """Refuse a file that this run would not merely bring up to date; that of a quick run is worth nothing."""
        if not exists(path):
            return
        quick = suite_of(Results.load(path), path).quick
        if self.suite.quick and not quick:
            raise EvaluationError(f"{path} holds real results; let a quick run write to another directory")
        if quick and not self.suite.quick:
            return
        for evaluation in self.evaluations:
            evaluation.check_alike(path)
        check_nothing_lost(path, set[tuple[str, int]]().union(*(part.rollouts for part in self.evaluations)))

    def run(
        self,
        backend: Backend = one_by_one,
        run: Callable[..., Results] = Evaluation.run,
        *,
        progress: bool = True,
    ) -> Results:
        """All evaluations, in one value.

        Args:
            backend: Runs the rollouts.
            run: Runs one evaluation: all of its rollouts, or as many as `sequential.run_until_settled` takes.
            progress: Whether to show bars.
        """
        parts = [run(evaluation, backend, progress=progress) for evaluation in self.evaluations]
        # the full policy is in every part, and has a rollout for each that it is compared with
        records = {(item.method, item.seed): item for part in parts for item in part.records}
        clocked = {(item.method, item.seed): item for part in parts for item in part.clocked}
        holder = {method.name: method for part in reversed(parts) for method in part.methods}
        methods = tuple(holder[name] for name in dict.fromkeys((BASELINE, *self.suite.methods)))
        said, kind = {"suite": self.suite.describe()}, KINDS[self.suite.name]
        setting = self.evaluations[0].setting
        candidates = {name: found for part in self.evaluations for name, found in part.candidates.items()}
        if kind.exact:
            said["exact"] = asdict(exact_savings(setting, candidates))
        if kind.features:
            said["open_loop"] = asdict(open_loop_facts(setting, candidates))
        return replace(
            parts[0],
            setting={**parts[0].setting, **said},
            methods=methods,
            records=tuple(item for method in methods for item in records.values() if item.method == method.name),
            clocked=tuple(item for method in methods for item in clocked.values() if item.method == method.name),
        )

    def on(self, clock: Clock) -> SuiteRun:
        """The same suite with every method on this clock."""
        parts = self.evaluations
        return replace(
            self, evaluations=tuple(replace(part, clocks=dict.fromkeys(part.candidates, clock)) for part in parts)
        )


def exact_savings(setting: Setting, candidates: Mapping[str, Candidate]) -> ExactSavings:
    """What the engines of these methods save exactly, and that it is exact: on the open-loop comparison's observations."""
    with one_thread():
        plain, full = (
            np.asarray(OpenLoop(candidate, 0).run(setting)["actions"])
            for candidate in (Candidate(), candidates[BASELINE])
        )
        flops = {name: engine_flops(setting.port, candidate) for name, candidate in candidates.items()}
    return ExactSavings(float((np.abs(full - plain) * setting.port.action_scale).max()), flops)


def open_loop_facts(setting: Setting, candidates: Mapping[str, Candidate]) -> OpenLoopFacts:
    """What each method does to the actions at the observations of the open-loop comparison, and the policy's dropout."""
    seen = rows(setting.observations, 0, FEATURE_OBSERVATIONS)

    def chunks(candidate: Candidate) -> Chunks:
        with running(setting.port, candidate) as fast:
            return draw_chunks(fast.act, seen, FEATURE_SAMPLES, setting.port.action_scale, 0)

    with one_thread():
        own = chunks(candidates[BASELINE])
        features = {name: action_features(chunks(found), own) for name, found in candidates.items() if name != BASELINE}
    config = getattr(setting.port.policy, "config", None)
    return OpenLoopFacts(getattr(config, "p_drop_attn", None), features)


def prepare_suite(setting: SuiteSetting, name: str) -> SuiteRun:
    """Calibrate, choose what is to be chosen by its FLOPs, and prepare the rollouts.

    Args:
        setting: What all suites of the directory share.
        name: Of the suite, a key of `suites.KINDS`.
    """
    (suite,) = setting.suites([name])
    suite = without_failed_fits(setting, suite)
    counts: dict[str, int] = {}
    for cell in suite.cells:
        counts[cell.method] = max(counts.get(cell.method, 0), setting.counts.of(cell))
    methods = {count: [name for name in counts if counts[name] == count] for count in counts.values()}
    return SuiteRun(suite, tuple(setting.evaluation(methods[count], count) for count in sorted(methods, reverse=True)))


def without_failed_fits(setting: SuiteSetting, suite: Suite) -> Suite:
    """The suite without fitted samplers that do not beat their start for this policy; what it is about says so."""
    failed: dict[str, FitError] = {}
    for sampler in dict.fromkeys(filter(None, map(_fitted, suite.methods))):
        try:
            setting.evaluation([sampler], 1)
        except FitError as error:
            failed[sampler] = error
    if not failed:
        return suite
    kept = tuple(cell for cell in suite.cells if _fitted(cell.method) not in failed)
    reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
    return replace(suite, cells=kept, about=f"{suite.about} Left out, with all that builds on it: {reasons}.")


def _fitted(method: str) -> str | None:
    """The method's sampler by itself, if it is a fitted one."""
    sampler = parse_method(method).sampler
    return str(sampler) if sampler is not None and sampler.facts.by_fit else None


def as_run(setting: SuiteSetting, directory: PathLike, names: Sequence[str]) -> list[Suite]:
    """Suites as their files in the directory have them, which may lack what could not be made; others as they would be."""
    files = {name: Path(directory) / f"{name}.json" for name in names}
    found = {name: suite_of(Results.load(path), path) for name, path in files.items() if exists(path)}
    missing = [name for name in names if name not in found]
    found |= dict(zip(missing, setting.suites(missing) if missing else (), strict=True))
    return [found[name] for name in names]


def time_suites(
    setting: SuiteSetting, directory: PathLike, repeats: int = 20, names: Sequence[str] = SUITES
) -> Timings:
    """Seconds per chunk of all methods of some suites, in one interleaved run, so that any two can be compared.

    What is timed must be what the suites in the directory ran: another schedule under the same name is refused.

    Args:
        setting: What all suites of the directory share.
        directory: With the suites' files, as far as they were run.
        repeats: Interleaved rounds.
        names: Of the suites.
    """
    methods = dict.fromkeys(method for suite in as_run(setting, directory, names) for method in suite.methods)
    evaluation = setting.evaluation(tuple(methods), 1)
    for name in names:
        evaluation.check_alike(Path(directory) / f"{name}.json")
    return evaluation.speed(repeats, progress=setting.progress)


def shortened(make: Callable[[], Task], steps: int) -> Task:
    """A task whose episodes end early: for a quick look at whether everything works."""
    task = make()
    return Changed(task, Variant(min(steps, task.spec.max_steps)), task.spec.name)


def realtime_clocks(action_steps: int, delays: Sequence[int] = DELAYS) -> dict[str, Clock]:
    """The clock of each cell, by the name of its file.

    Args:
        action_steps: The policy's `n_action_steps`: replanning is after half of them, or after all in stop and think.
        delays: In ticks.
    """
    return {
        f"{REALTIME}-{mode}-{delay}": choose_clock((delay / RATE,), action_steps, rate=RATE, hold=True, **settings)
        for delay in delays
        for mode, settings in MODES.items()
        if delay or mode != "rtc"
    }


def run_realtime(
    ready: SuiteRun,
    directory: PathLike,
    delays: Sequence[int] = DELAYS,
    backend: Backend = one_by_one,
    *,
    progress: bool = True,
) -> Iterator[tuple[Path, Results]]:
    """Run the cells and write each as it is finished; what the store holds of them is not run again.

    Args:
        ready: The suite, off the clock.
        directory: For the files.
        delays: In ticks.
        backend: Runs the rollouts.
        progress: Whether to show bars.
    """
    action_steps = ready.evaluations[0].setting.port.n_action_steps
    cells = {
        Path(directory) / f"{name}.json": ready.on(clock)
        for name, clock in realtime_clocks(action_steps, delays).items()
    }
    for path, cell in cells.items():
        cell.check_output(path)
    for path, cell in cells.items():
        results = cell.run(backend, progress=progress)
        results.save(path)
        yield path, results
