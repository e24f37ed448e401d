"""A suite that has a directory of its own, as its page sees it: results, times, and the commands that made them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from blockcache.compare.methods import method_named
from blockcache.results.rollouts import BASELINE
from blockcache.results.summary import MethodSummary
from blockcache.results.timings import Timings
from blockcache_lab.studies.suite_results import Collection, SuiteResults


@dataclass(frozen=True, eq=False)
class OwnSuite:
    """One policy's suite, and its timings if they are there."""

    directory: str
    collection: Collection

    @property
    def item(self) -> SuiteResults:
        (item,) = self.collection.suites.values()
        return item

    @property
    def timings(self) -> Timings | None:
        return self.collection.timings

    @property
    def task(self) -> str:
        return str(self.item.results.task["name"])

    @cached_property
    def compared(self) -> dict[str, MethodSummary]:
        """Methods with a difference to the full policy."""
        rows = self.collection.rows.items()
        return {name: row for name, row in rows if row.difference is not None and name != BASELINE}

    @property
    def tuned_option(self) -> str:
        """As one would type it behind a command; nothing where nothing tuned is compared."""
        tuned = next(filter(None, (method_named(name).tuned_in for name in self.compared)), None)
        return "" if tuned is None else f" --tuned {tuned}"

    @property
    def commands(self) -> list[str]:
        """What made the files, as far as they are there."""
        name, source = self.item.suite.name, self.item.results.policy["source"]
        made = [f"`{self.item.command(self.directory)}{self.tuned_option}`"]
        if self.timings is not None:
            made.append(f"`blockcache paper timing {source} --suite {name} -o {self.directory}{self.tuned_option}`")
        return made
