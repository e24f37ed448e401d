"""Figures in pages that people write: put in from the records, between marks that a reader of the page does not see.

    <!-- figure: frontier-pusht tuned difference -->-0.003 [-0.025, +0.018]<!-- end -->
    <!-- figure: pusht ddpm-16 against bac:S=10,n=5 -->...<!-- end -->
    <!-- figures: frontier-pusht | full tuned ddpm-16 | ms flops difference -->   (in front of a table, below)

The first word is a directory of records, `DIRECTORY/FILE` for one file of rollouts in it, or `POLICY/tuned` for what was
tuned for a shipped policy; a pattern such as `metaworld-assembly-seed*` takes several policies of one task together. A method has its name, or `plain` (the policy in torch), `tuned`, or `ddpm@bac:S=10,n=5`: the method beginning
with "ddpm" that was chosen to have the FLOPs of the other. A table has one row for each method, and for each directory
one column for each quantity; its first column stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.measure.statistics import Estimate
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache.results.summary import MethodSummary
from blockcache.results.tuning import Tuning
from blockcache_lab.pages.frontier import FrontierSuite
from blockcache_lab.pages.other_policies import load_other_policies
from blockcache_lab.pages.rollout_figures import RolloutFigures
from blockcache_lab.studies.suites import FRONTIER, RDT, SUITES, TABLES, Cell

_ONE = re.compile(r"(<!-- figure: ([^>]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
_TABLE = re.compile(r"(<!-- figures: ([^>]+) -->\n\|.*\n\|[-:| ]+\|\n)((?:\|.*\n)+)")


def fill(text: str, records: Path) -> str:
    """The text with every figure as the records have it.

    Args:
        text: A page, in Markdown.
        records: The directory that holds the directories of records.
    """

    @cache
    def source(name: str) -> Callable[..., str]:
        """What shows a figure of these records, given a method, a quantity and, for some, another method."""
        if name.endswith("/tuned"):
            return _of_tuning(name)
        if "/" in name:
            return RolloutFigures.load(records, name).figure
        return _of_policies(records, name) if "*" in name else _Policy.load(records / name).figure

    def one(match: re.Match[str]) -> str:
        name, method, *asked = match[2].split()
        return f"{match[1]}{source(name)(method, *asked)}{match[4]}"

    def table(match: re.Match[str]) -> str:
        names, methods, quantities = (part.split() for part in match[2].split(" | "))
        rows = match[3].splitlines()
        if len(rows) != len(methods):
            raise FileError(
                f"the table below '<!-- figures: {match[2]} -->' has {len(rows)} rows, expected {len(methods)}"
            )
        made = []
        for row, method in zip(rows, methods, strict=True):
            cells = [source(name)(method, quantity) for name in names for quantity in quantities]
            made.append(f"| {row.split('|')[1].strip()} | {' | '.join(cells)} |\n".replace("|  |", "| |"))
        return match[1] + "".join(made)

    return _TABLE.sub(table, _ONE.sub(one, text))


def count(text: str) -> int:
    """How many figures a page has that are put in; a table counts as one.

    Args:
        text: A page, in Markdown.
    """
    return len(_ONE.findall(text)) + len(_TABLE.findall(text))


class _Policy(FrontierSuite):
    """The records of one policy, of whichever suites there are."""

    NAMES = (*SUITES, FRONTIER, RDT, TABLES)

    def figure(self, method: str, quantity: str, other: str | None = None) -> str:
        if quantity == "correlation":
            return f"{self.correlations()[method.replace('-', ' ')]:.2f}"
        found, name = self._named(method), Path(self.directory).name
        if quantity == "against" and other is not None:
            value = self.compare(found, self._named(other))
            if value is None:
                raise FileError(f"the records {name} have no episode that both {found} and {other} finished")
            return _signed(value)
        if quantity in _MEASURED:
            shown = _MEASURED[quantity](self, found)
            if shown is None:
                raise FileError(
                    f"the records {name} hold no {quantity} of {found}; run 'blockcache paper timing' or 'distances'"
                )
            return shown
        if quantity not in _OF_ROW:
            words = ", ".join((*_MEASURED, "against METHOD", "correlation", *_OF_ROW))
            raise FileError(f"no quantity {quantity!r} of {name}, expected one of {words}")
        return _OF_ROW[quantity](self.rows[BASELINE if found == PLAIN else found], self.full)

    def _named(self, method: str) -> str:
        where = Path(self.directory).name
        return PLAIN if method == "plain" else _resolve(method, self.rows, self.equals, where)

    def distance(self, method: str, name: str, form: Callable[[Estimate], str]) -> str | None:
        """One of the method's distances, if they were measured."""
        known = {} if self.distances is None else self.distances.methods
        return form(getattr(known[method].distances, name)) if method in known else None


def _interval(value: Estimate) -> str:
    return value.text("{:.3f}")


def _time(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _signed(value: Estimate | None) -> str:
    return "" if value is None else value.text("{:+.3f}")


_MEASURED: dict[str, Callable[[_Policy, str], str | None]] = {
    "ms": lambda policy, method: _time(policy.ms(method)),
    "times-plain": lambda policy, method: _time(policy.over(method, PLAIN)),
    "noise-floor": lambda policy, method: f"{policy.first.noise_floor.mean:.3f}",
    "centre-shift": lambda policy, method: policy.distance(method, "centre_shift", _interval),
    "energy": lambda policy, method: policy.distance(method, "energy", _interval),
    "beyond-spread": lambda policy, method: policy.distance(method, "beyond_spread", _interval),
    "spread": lambda policy, method: policy.distance(method, "spread", lambda value: f"{value.mean:.2f}"),
}
"""What is measured beside the rollouts, of a method by its name; None where it was not."""
_OF_ROW: dict[str, Callable[[MethodSummary, MethodSummary], str]] = {
    "difference": lambda row, full: _signed(row.difference),
    "score": lambda row, full: "" if row.score is None else row.score.text("{:.3f}"),
    "success": lambda row, full: "" if row.success is None else f"{row.success.mean:.2f}",
    "n": lambda row, full: "0" if row.score is None else str(row.score.n),
    "flops": lambda row, full: "1" if row is full else f"1/{full.method.flops / row.method.flops:.0f}",
    "error": lambda row, full: f"{row.method.error.mean:.3f}",
    "jerk": lambda row, full: "" if row.jerk is None else f"{row.jerk:.2f}",
}
"""How a figure of a method's row is shown; the second row is the full policy's."""


def _of_tuning(name: str) -> Callable[..., str]:
    """Figures of what was tuned for a shipped policy: `chosen` on its tuning seeds, on fresh ones, and how long it took."""
    place = resources.files("blockcache").joinpath("assets", "policies", *name.split("/"), "tuning.json")
    with resources.as_file(place) as path:
        tuning = Tuning.load(path)
    known = {
        "tuning-seeds": _signed(tuning.chosen.rollouts),
        "fresh-seeds": _signed(tuning.fresh),
        "pairs": str(tuning.fresh.n if tuning.fresh else 0),
        "minutes": f"{tuning.setting['seconds'] / 60:.0f}",
    }

    def figure(method: str, quantity: str) -> str:
        if method != "chosen" or quantity not in known:
            raise FileError(f"of a tuning there is 'chosen' with {', '.join(known)}, got '{method} {quantity}'")
        return known[quantity]

    return figure


def _of_policies(records: Path, pattern: str) -> Callable[..., str]:
    """Figures of suite main of several policies of one task, taken together."""
    directories = sorted(records.glob(pattern))
    if not directories:
        raise FileError(f"no records at {records / pattern}")
    (task,) = load_other_policies(directories)
    equals = [[cell for cell in item.suite.cells if cell.equals] for item in task.policies]

    def named(method: str) -> list[str]:
        """The method of each policy."""
        pairs = zip(task.policies, equals, strict=True)
        return [_resolve(method, item.rows, equal, pattern) for item, equal in pairs]

    def figure(method: str, quantity: str, other: str | None = None) -> str:
        if quantity not in ("difference", "against") or (quantity == "against") != (other is not None):
            raise FileError(f"of several policies there is 'difference' and 'against METHOD', got {quantity!r}")
        return _signed(task.difference(named(method), named(other or BASELINE)))

    return figure


def _resolve(method: str, rows: Mapping[str, MethodSummary], equals: Sequence[Cell], where: str) -> str:
    start, at, equal = method.partition("@")
    if at:
        chosen = {cell.method: method_named(cell.method) for cell in equals if cell.equals == equal}
        alike = [name for name, known in chosen.items() if known.facts.word == start]
        found = [name for name in alike if chosen[name].off_the_shelf] or alike
    else:
        found = [name for name in rows if method in (name, method_named(name).portable_name)]
    if len(set(found)) != 1:
        raise FileError(f"the records {where} have {len(found)} methods {method!r}, expected one of {', '.join(rows)}")
    return found[0]
