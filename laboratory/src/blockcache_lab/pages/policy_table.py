"""One policy's suites as the page of the paper's tables needs them. From files only; knows nothing of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blockcache.errors import FileError
from blockcache.files import exists
from blockcache.measure.statistics import Estimate
from blockcache.report.document import plain
from blockcache.results.rollouts import BASELINE
from blockcache_lab.pages.published import Place
from blockcache_lab.studies.open_loop import OpenLoopFacts, open_loop_of
from blockcache_lab.studies.suite_results import SuiteResults, paired
from blockcache_lab.studies.suites import BASE, SUITES, TABLES, Cell


@dataclass(frozen=True, eq=False)
class PolicyTable:
    """One policy's suites, and what the first one's file says of its actions.

    Args:
        directory: Of the files.
        suites: Those that are there: suite `tables` first, then the paper's.
        facts: Of the actions at recorded observations, if they were measured.
    """

    directory: str
    suites: tuple[SuiteResults, ...]
    facts: OpenLoopFacts | None

    @classmethod
    def load(cls, directory: str) -> PolicyTable:
        paths = [path for name in (TABLES, *SUITES) if exists(path := Path(directory) / f"{name}.json")]
        suites = tuple(map(SuiteResults.load, paths))
        if not suites or suites[0].suite.name not in (TABLES, SUITES[0]):
            raise FileError(
                f"no results of the suites {TABLES} or {SUITES[0]} in {directory}; run 'blockcache paper suite {TABLES} "
                f"POLICY -o {directory}' first"
            )
        return cls(directory, suites, open_loop_of(suites[0].results, paths[0]))

    @property
    def first(self) -> SuiteResults:
        """The suite whose methods stand beside their rivals."""
        return self.suites[0]

    @property
    def task(self) -> str:
        return str(self.first.results.task["name"])

    @property
    def dropout(self) -> float | None:
        return None if self.facts is None else self.facts.dropout

    @property
    def label(self) -> str:
        """The task, and the dropout of training where there was some."""
        return plain(Path(self.directory).name) + (f" (dropout {self.dropout:g})" if self.dropout else "")

    @property
    def printed(self) -> Iterator[tuple[SuiteResults, Cell]]:
        """Each printed row once, with the first suite that has it."""
        known: set[tuple[str, str]] = set()
        for item in self.suites:
            for cell in item.suite.cells:
                if cell.printed and (cell.printed, cell.method) not in known:
                    known.add((cell.printed, cell.method))
                    yield item, cell

    @cached_property
    def loss(self) -> Estimate | None:
        """Of BAC, S = 10, n = 5, to full precision."""
        return self.first.compare(BASE, BASELINE)

    @property
    def rougher(self) -> float | None:
        """How many times as rough the actions of its episodes are under BAC."""
        own, found = self.first.rows[BASELINE].jerk, self.first.rows[BASE].jerk
        return found / own if own and found is not None else None


def scores_at(item: SuiteResults, method: str, place: Place) -> dict[int, float]:
    """By seed, of episodes that ended; at a place with stages, 1 where the stage was reached.

    Args:
        item: The suite.
        method: One of its methods.
        place: Where its task stands in the printed tables.
    """
    found = item.scores(method)
    return found if place.least is None else {seed: float(score >= place.least) for seed, score in found.items()}


def difference_at(item: SuiteResults, method: str, place: Place) -> Estimate | None:
    """The paired difference to full precision, of the same.

    Args:
        item: The suite.
        method: One of its methods.
        place: Where its task stands in the printed tables.
    """
    if method == BASELINE:
        return None
    return paired(scores_at(item, method, place), scores_at(item, BASELINE, place), item.stopped)
