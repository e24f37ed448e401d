"""All suites of a directory, as one value: the methods' rows, any two of them compared, and how long each takes.

From the files of `blockcache paper suite` only. Knows nothing of torch or of pages.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.files import PathLike, exists
from blockcache.fingerprint import fingerprint_differences
from blockcache.measure.sequences import valid_interval
from blockcache.measure.statistics import Estimate, mean_interval, paired_difference
from blockcache.results.rollouts import BASELINE, GENERATIONS, GROUP, SETTLED, Results
from blockcache.results.stored import Stored, StoredMethod
from blockcache.results.summary import MethodSummary, most_rollouts, summarise
from blockcache.results.timings import Timings
from blockcache_lab.studies.suites import FRONTIER, SUITES, TIMINGS, Cell, Suite, suite_of

C = TypeVar("C", bound="Collection")


@dataclass(frozen=True, eq=False)
class SuiteResults:
    """A suite's file: what it says of the suite, and its rollouts."""

    suite: Suite
    results: Results

    @classmethod
    def load(cls, path: PathLike) -> SuiteResults:
        results = Results.load(path)
        return cls(suite_of(results, path), results)

    @cached_property
    def rows(self) -> dict[str, MethodSummary]:
        return {row.method.name: row for row in summarise(self.results)}

    @property
    def stopped(self) -> bool:
        """Whether a method's rollouts ended once its verdict was settled: intervals must allow for that."""
        return bool(self.results.setting.get(SETTLED))

    @property
    def rollouts(self) -> list[int]:
        """How many a method has, failed ones included; not all have equally many."""
        return sorted({len(self.results.of(method.name)) for method in self.results.methods})

    def command(self, directory: str) -> str:
        """What made the suite's file in that directory."""
        made = f"blockcache paper suite {self.suite.name} {self.results.policy['source']} -o {directory}"
        if self.suite.quick:
            return f"{made} --quick"
        group, generations = self.results.setting["group"], self.results.setting["calibration"]["generations"]
        amounts = {
            "rollouts": self.rollouts[-1 if self.stopped else 0],  # of those that were stopped, the most
            "main-rollouts": self.rollouts[-1] if any(cell.main for cell in self.suite.cells) else None,
            "group": None if group == GROUP else group,
            "generations": None if generations == GENERATIONS else generations,
        }
        made += "".join(f" --{option} {count}" for option, count in amounts.items() if count is not None)
        return f"{made} --until-settled" if self.stopped else made

    def scores(self, method: str, seeds: Container[int] | None = None) -> dict[int, float]:
        """By seed, of the episodes that ended; of some seeds or all."""
        found = {seed: record.score for seed, record in self.results.of(method).items() if record.score is not None}
        return found if seeds is None else {seed: score for seed, score in found.items() if seed in seeds}

    def mean(self, method: str, seeds: Container[int] | None = None) -> Estimate | None:
        """A method's mean score; None where it finished no episode."""
        scores = self.scores(method, seeds)
        return mean_interval(list(scores.values())) if scores else None

    def compare(self, found: str, baseline: str, seeds: Container[int] | None = None) -> Estimate | None:
        """The paired difference of two methods' scores; None where they share no finished episode."""
        return paired(self.scores(found, seeds), self.scores(baseline), self.stopped)


def paired(found: Mapping[int, float], baseline: Mapping[int, float], stopped: bool = False) -> Estimate | None:
    """The paired difference over the episodes that are in both; None where there is none.

    Args:
        found: Scores by seed.
        baseline: Those that they are compared with.
        stopped: Whether episodes were run one after another until they sufficed.
    """
    both = sorted(found.keys() & baseline.keys())
    if not both:
        return None
    one, other = [found[seed] for seed in both], [baseline[seed] for seed in both]
    return valid_interval(np.subtract(one, other)) if stopped else paired_difference(one, other)


@dataclass(frozen=True, eq=False)
class Collection:
    """At least one suite, all of one policy and task, and the same schedule wherever a method has the same name."""

    suites: Mapping[str, SuiteResults]
    timings: Timings | None
    directory: str

    NAMES: ClassVar[Sequence[str]] = SUITES

    @classmethod
    def load(cls: type[C], directory: PathLike, names: Sequence[str] = ()) -> C:
        names = names or cls.NAMES
        paths = {name: Path(directory) / f"{name}.json" for name in names}
        suites = {name: SuiteResults.load(path) for name, path in paths.items() if exists(path)}
        if not suites:
            raise FileError(
                f"no suite's results in {directory}; run 'blockcache paper suite {names[0]} POLICY -o {directory}' first"
            )
        _check_alike(suites)
        timed = Path(directory) / TIMINGS
        timings = Timings.load(timed) if exists(timed) else None
        run = next(iter(suites.values())).results.fingerprint
        if timings is not None and (differences := fingerprint_differences(run, timings.policy)):
            raise FileError(f"{timed} is of another policy than the suites ({'; '.join(differences)}); time them again")
        return cls(suites, timings, str(directory))

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in SUITES if name not in self.suites)

    @property
    def quick(self) -> bool:
        return any(item.suite.quick for item in self.suites.values())

    @property
    def first(self) -> Results:
        return next(iter(self.suites.values())).results

    @cached_property
    def rows(self) -> dict[str, MethodSummary]:
        """Each method's row, from the suite in which it has the most rollouts."""
        return most_rollouts(row for item in self.suites.values() for row in item.rows.values())

    @property
    def full(self) -> MethodSummary:
        return self.rows[BASELINE]

    @cached_property
    def differences(self) -> dict[str, Estimate]:
        """The paired difference to the full policy, of every method that has one."""
        rows = self.rows.items()
        return {name: row.difference for name, row in rows if row.difference is not None and name != BASELINE}

    @property
    def lossless(self) -> list[str]:
        return [name for name, difference in self.differences.items() if difference.lossless]

    @property
    def cheapest(self) -> str | None:
        """The lossless method with the fewest FLOPs, if there is one."""
        return min(self.lossless, key=lambda name: self.rows[name].method.flops, default=None)

    def ms(self, method: str) -> float | None:
        """Milliseconds of a chunk, if they are known."""
        return None if self.timings is None else self.timings.ms(method)

    def over(self, method: str, baseline: str) -> float | None:
        """How many times faster than the baseline, if both were timed."""
        return None if self.timings is None else self.timings.over(method, baseline)

    def compare(self, found: str, baseline: str) -> Estimate | None:
        """The paired difference of two methods, over as many rollouts as some suite has of both."""
        known = [item.compare(found, baseline) for item in self.suites.values()]
        return max((value for value in known if value is not None), key=lambda value: value.n, default=None)

    @cached_property
    def equals(self) -> list[Cell]:
        """Cells that were chosen to have another method's FLOPs, each pair once."""
        cells = [cell for item in self.suites.values() for cell in item.suite.cells if cell.equals]
        return list({(cell.equals, cell.method): cell for cell in cells}.values())


def _check_alike(suites: Mapping[str, SuiteResults]) -> None:
    """Refuse to put side by side what was not run on the same thing."""
    (first, one), *others = suites.items()
    known = {method.name: (first, method) for method in one.results.methods}
    for name, item in others:
        a, b = one.results, item.results
        policies = [found.fingerprint for found in (a, b)]
        differences = fingerprint_differences(policies[0], policies[1])
        if a.task != b.task:
            differences = (*differences, f"task {b.task} instead of {a.task}")
        if a.setting["calibration"] != b.setting["calibration"]:
            differences = (*differences, "another calibration")
        for method in b.methods:
            where, before = known.setdefault(method.name, (name, method))
            if (before.engine, before.sampler, before.reuse) != (method.engine, method.sampler, method.reuse):
                differences = (*differences, f"another schedule or engine under the name {method.name} than {where}")
        if differences:
            raise FileError(
                f"the suites {first} and {name} do not belong together: {name} has {'; '.join(differences)}; run one again"
            )


def summarise_suite(collection: Collection, suite: str = FRONTIER) -> Stored:
    """The small summary of a suite that the demo shows as stored. Only of real results: a quick run stores nothing.

    Args:
        collection: The suites of one policy.
        suite: The name of the one to store.
    """
    if suite not in collection.suites:
        raise FileError(
            f"a stored result needs the suite {suite}, which is not there; run 'blockcache paper suite {suite} POLICY'"
        )
    found = collection.suites[suite]
    if found.suite.quick:
        raise FileError(
            f"a quick run is no result to store; run 'blockcache paper suite {suite} POLICY' without --quick"
        )
    methods = [
        StoredMethod(method_named(name).portable_name, row.method.flops, collection.ms(name), row.score, row.difference)
        for name, row in found.rows.items()
        if row.score is not None and row.score.n > 1  # a single rollout has no interval to write down
    ]
    results = found.results
    weights, calibration = results.policy["fingerprint"]["weights"], dict(results.setting["calibration"])
    return Stored(results.task["name"], weights, calibration, tuple(methods))
