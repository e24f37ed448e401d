"""What suite rdt says of several policies, in sentences: what is lossless where, and who wins at equal FLOPs.

From the suites' files only; every verdict is computed. Knows nothing of torch or of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blockcache.compare.methods import method_named
from blockcache.report.document import plain
from blockcache.report.methods import of_full
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache_lab.pages.published import printed_rdt
from blockcache_lab.pages.suite_parts import PolicySuite, counted
from blockcache_lab.studies.open_loop import ExactSavings, exact_of
from blockcache_lab.studies.suites import RDT

EXACT = 1e-5
"""Actions, in normalised units, that differ by less are the same but for rounding."""
SELDOM = 0.2
"""A policy that certainly succeeds less often than this has little to lose."""


@dataclass(frozen=True, eq=False)
class RdtSuite(PolicySuite):
    """One policy's suite, with what its engines save exactly if the file says so."""

    NAMES = (RDT,)

    @cached_property
    def exact(self) -> ExactSavings | None:
        return exact_of(self.first, Path(self.directory) / f"{RDT}.json")

    @property
    def bacs(self) -> dict[int, str]:
        """The BAC schedules under the policy's own sampler, by S."""
        found = {name: method_named(name) for name in self.differences}
        return {
            method.facts.updates: name
            for name, method in found.items()
            if method.family == "BAC" and method.facts.updates
        }

    @property
    def equal_pairs(self) -> list[tuple[str, str]]:
        """BAC and its rivals at equal FLOPs, by formula."""
        return [(str(cell.equals), cell.method) for cell in self.equals]

    @property
    def cheaper_pairs(self) -> list[tuple[str, str]]:
        """BAC and the most steps of the solver that cost no more in the engine."""
        if self.exact is None:
            return []
        flops, pairs = self.exact.flops, []
        plain_steps = [name for name in self.differences if method_named(name).off_the_shelf]
        for bac in self.bacs.values():
            fitting = [name for name in plain_steps if flops[name] <= flops[bac]]
            pairs += [(bac, max(fitting, key=lambda name: flops[name]))] if fitting else []
        return pairs


def summary(suites: Sequence[RdtSuite]) -> list[str]:
    """What the data say, in sentences; all tasks together."""
    said, fastest = printed_rdt()
    items = [
        f"**The paper**: {said}; up to {fastest:g}x. S = 1 computes less than S = 2, so losing less there would be a surprise."
    ]
    for updates in sorted({updates for item in suites for updates in item.bacs}):
        items.append(f"**BAC S = {updates}**: {_verdicts(suites, updates)}.")
    everywhere = [
        plain(method_named(names[0]).label)
        for names in shared(suites)
        if all(name in item.lossless for item, name in zip(suites, names, strict=True))
    ]
    items.append(f"**Lossless on every task**, of the methods that all of them met: {', '.join(everywhere) or 'none'}.")
    items.append(f"**The cheapest lossless method**: {'; '.join(map(_cheapest, suites))}.")
    equal = [(item, pair) for item in suites for pair in item.equal_pairs]
    cheaper = [(item, pair) for item in suites for pair in item.cheaper_pairs]
    items += [f"**At equal FLOPs** {line}" for line in counted(equal)]
    items += [f"**At no more FLOPs in the engine** {line}" for line in counted(cheaper)]
    if exact := [line for item in suites if (line := _exactly(item))]:
        items.append(
            f"**The engine alone**, every block computed and nothing approximated: {'; '.join(exact)}. Speed beyond the FLOPs "
            "that are saved is the engine's own: it runs no Python."
        )
    if weak := [item.task for item in suites if (success := item.full.success) and success.high < SELDOM]:
        items.append(
            f"Full precision itself seldom succeeds on {', '.join(map(plain, weak))}: little can be lost there."
        )
    return items


def _verdicts(suites: Sequence[RdtSuite], updates: int) -> str:
    """On which tasks BAC is lossless, on which it is worse and by how much, and where neither is shown."""
    places: dict[str, list[str]] = {"lossless": [], "worse": [], "not shown either way": []}
    for item in suites:
        difference = item.differences.get(item.bacs.get(updates, ""))
        if difference is None:
            continue
        if difference.lossless:
            places["lossless"].append(plain(item.task))
        elif difference.high < 0:
            places["worse"].append(f"{plain(item.task)} (by {-difference.mean:.2f})")
        else:
            places["not shown either way"].append(f"{plain(item.task)} ({difference.mean:+.2f})")
    return "; ".join(f"{verdict} on {', '.join(tasks)}" for verdict, tasks in places.items() if tasks)


def shared(suites: Sequence[RdtSuite]) -> list[tuple[str, ...]]:
    """What every policy met, in the order of the suite: the method by its name on each. What was tuned goes by one name for
    people, and is another method on each."""
    named = [
        {method_named(name).label: name for name in item.item.suite.methods if name in item.differences}
        for item in suites
    ]
    return [tuple(names[key] for names in named) for key in named[0] if all(key in names for names in named)]


def _cheapest(suite: RdtSuite) -> str:
    best = suite.cheapest
    if best is None:
        return f"on {plain(suite.task)} none"
    share = of_full(suite.rows[best].method.flops, suite.full.method.flops)
    over = suite.over(best, BASELINE)
    speed = "" if over is None else f", {over:.1f}x over full precision in the same engine"
    return f"on {plain(suite.task)} {plain(method_named(best).label)} ({share} of the FLOPs{speed})"


def _exactly(suite: RdtSuite) -> str | None:
    if suite.exact is None:
        return None
    full = suite.full.method.flops
    over = suite.over(BASELINE, PLAIN)
    speed = "" if over is None else f"{over:.1f}x the speed of the plain policy with "
    return (
        f"on {plain(suite.task)} {speed}{suite.exact.flops[BASELINE] / full:.0%} of its FLOPs, actions "
        f"{'the same' if suite.exact.largest_difference < EXACT else '**not the same**'} within {EXACT:g}"
    )


def is_success(suite: RdtSuite) -> bool:
    """Whether the task has no score besides success."""
    records = [record for record in suite.item.results.records if record.error is None]
    return all(record.score == float(bool(record.success)) for record in records)
