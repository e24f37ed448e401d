"""docs/generated/paper-tables.md: the paper's main table beside ours, policy by policy, and when BAC costs nothing.

From the files of the suites `tables` and `main` only. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.files import exists
from blockcache.measure.statistics import (
    Estimate,
    difference_interval,
    mean_interval,
    paired_difference,
    rank_correlation,
)
from blockcache.report.document import Block, Bullets, Document, Paragraph, Section, plain, table
from blockcache.report.methods import DIFFERENCE, SCORE, estimate, lossless, of_full
from blockcache.results.rollouts import BASELINE, Results
from blockcache_lab.pages.published import PLACES, Place, printed_cell
from blockcache_lab.pages.suite_parts import QUICK, made_from, verdict
from blockcache_lab.studies.open_loop import OpenLoopFacts, open_loop_of
from blockcache_lab.studies.suite_results import SuiteResults
from blockcache_lab.studies.suites import BASE, TABLES, suite_of


@dataclass(frozen=True, eq=False)
class PolicyTable:
    """One policy's suite, and what its file says of its actions."""

    directory: str
    item: SuiteResults
    facts: OpenLoopFacts | None

    @classmethod
    def load(cls, directory: str) -> PolicyTable:
        paths = [Path(directory) / f"{name}.json" for name in (TABLES, "main")]
        path = next(filter(exists, paths), None)
        if path is None:
            raise FileError(
                f"no results of the suites {TABLES} or main in {directory}; run 'blockcache paper suite {TABLES} POLICY "
                f"-o {directory}' first"
            )
        results = Results.load(path)
        return cls(directory, SuiteResults(suite_of(results, path), results), open_loop_of(results, path))

    @property
    def task(self) -> str:
        return str(self.item.results.task["name"])

    @property
    def dropout(self) -> float | None:
        return None if self.facts is None else self.facts.dropout

    @property
    def label(self) -> str:
        """The task, and the dropout of training where there was some."""
        return plain(Path(self.directory).name) + (f" (dropout {self.dropout:g})" if self.dropout else "")

    def scores(self, method: str, place: Place | None = None) -> dict[int, float]:
        """By seed, of rollouts that ended; at a place with stages, 1 where the stage was reached."""
        found = {seed: record.score for seed, record in self.item.results.of(method).items()}
        ended = {seed: score for seed, score in found.items() if score is not None}
        if place is None or place.least is None:
            return ended
        return {seed: float(score >= place.least) for seed, score in ended.items()}

    def difference(self, found: str, baseline: str, place: Place | None = None) -> Estimate | None:
        one, other = self.scores(found, place), self.scores(baseline, place)
        both = [seed for seed in one if seed in other]
        return paired_difference([one[seed] for seed in both], [other[seed] for seed in both]) if both else None

    @cached_property
    def loss(self) -> Estimate | None:
        """Of BAC, S = 10, n = 5, to full precision."""
        return self.difference(BASE, BASELINE)

    @property
    def rougher(self) -> float | None:
        """How many times as rough the actions of its episodes are under BAC."""
        own, found = self.item.rows[BASELINE].jerk, self.item.rows[BASE].jerk
        return found / own if own and found is not None else None


def page(policies: Sequence[PolicyTable]) -> Document:
    """The paper's tables beside the figures of these policies.

    Args:
        policies: Each with the files of its suites, in the order of the page.
    """
    directories = " ".join(policy.directory for policy in policies)
    quick = [QUICK] if any(policy.item.suite.quick for policy in policies) else []
    about = Paragraph(
        "The paper prints two figures, labelled as the best and the mean of the last 10 checkpoints of three training seeds,\n"
        "on demonstrations by people; ours are one policy each, on demonstrations by scripted experts where the task is not\n"
        "Push-T. So the figures in a line tell of different policies; the differences to full precision are what to compare.\n"
        "Differences are paired, with 95 % intervals. Lossless: the interval's lower end is above -0.03."
    )
    return Document(
        "The paper's tables beside ours",
        (
            made_from("suites tables and main", f"blockcache paper tables {directories}"),
            *quick,
            about,
            Section("When BAC is free", (Bullets(tuple(findings(policies))),)),
            Section("Cell by cell", (_cells(policies),)),
            Section("Rivals at the FLOPs of BAC S = 10, n = 5, or fewer", (_rivals(policies),)),
            Section("Trained with dropout, and without", tuple(_dropout(policies))),
            Section("How the files were made", (Bullets(tuple(f"`{p.item.command(p.directory)}`" for p in policies)),)),
        ),
    )


def findings(policies: Sequence[PolicyTable]) -> list[str]:
    """Three sentences: where BAC is free, what dropout changes, what goes with a loss."""
    known = [(policy, policy.loss) for policy in _each_once(policies) if policy.loss is not None]
    free = [policy.label for policy, loss in known if loss.lossless]
    lost = [f"{policy.label} ({loss.mean:+.3f})" for policy, loss in known if loss.high < 0]
    open_ = [policy.label for policy, loss in known if not loss.lossless and loss.high >= 0]
    sentences = [
        f"**Where**: BAC S = 10, n = 5 is lossless on {len(free)} of {len(known)} policies ({_listed(free)}), loses on "
        f"{len(lost)} ({_listed(lost)}), and on {len(open_)} neither is shown ({_listed(open_)})."
    ]
    sentences.append(f"**Dropout**: {_of_dropout(_pairs(policies))}.")
    columns = [
        ("action error", [policy.item.rows[BASE].method.error.mean for policy, _ in known]),
        ("how much rougher its actions are", [policy.rougher or 1.0 for policy, _ in known]),
        ("the score of full precision", [policy.item.rows[BASELINE].score.mean for policy, _ in known]),  # type: ignore[union-attr]
    ]
    losses = [-loss.mean for _, loss in known]
    if len(known) > 2 and len(set(losses)) > 1:
        ranks = ", ".join(
            f"{name} {rank_correlation(values, losses):+.2f}" for name, values in columns if len(set(values)) > 1
        )
        sentences.append(
            f"**What goes with it**: over {len(known)} policies, the rank correlation of BAC's loss with {ranks}."
        )
    return sentences


def _each_once(policies: Sequence[PolicyTable]) -> list[PolicyTable]:
    """Of a policy that two suites know, the file with more episodes under BAC."""
    most: dict[tuple[str, str, float], PolicyTable] = {}
    for policy in policies:
        key = policy.task, policy.item.results.policy["fingerprint"]["weights"], policy.dropout or 0.0
        if key not in most or len(policy.scores(BASE)) > len(most[key].scores(BASE)):
            most[key] = policy
    return [policy for policy in policies if policy in most.values()]


def _of_dropout(pairs: Sequence[tuple[str, PolicyTable, PolicyTable]]) -> str:
    """What it changes task by task and over all of them, and what it does to the actions that BAC changes."""
    changes = [(task, found) for task, none, some in pairs if (found := _changes(none, some))]
    if not changes:
        return "no task has policies with it and without"
    each = [f"{plain(task)} {_mean_change(found).text('{:+.3f}')}" for task, found in changes]
    every = _mean_change([change for _, found in changes for change in found])
    real = (
        "less is lost with it"
        if every.low > 0
        else "more is lost with it"
        if every.high < 0
        else "no difference is shown"
    )
    together = (
        f"; all episodes together {every.text('{:+.3f}')}: {real}, of one training seed each"
        if len(changes) > 1
        else ""
    )
    facts = [
        (before.features[BASE], after.features[BASE])
        for _, none, some in pairs
        for before, after in [(none.facts, some.facts)]
        if before is not None and after is not None and BASE in before.features and BASE in after.features
    ]
    shifts, rougher = (
        sum(getattr(after, name) < getattr(before, name) for before, after in facts) for name in ("shift", "rougher")
    )
    looks = f". With it BAC's centre shift is smaller on {shifts} of {len(facts)} tasks, what it adds to the roughness on {rougher}"
    return f"what BAC costs with dropout in training, less what it costs without: {_listed(each)}{together}{looks if facts else ''}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _cells(policies: Sequence[PolicyTable]) -> Block:
    rows = []
    for policy in policies:
        printed = {cell.printed.split("/", 1)[1]: cell.method for cell in policy.item.suite.cells if cell.printed}
        for place in PLACES.get(policy.task, ()):
            for row, method in printed.items():
                scores = list(policy.scores(method, place).values())
                difference = None if method == BASELINE else policy.difference(method, BASELINE, place)
                rows.append(
                    [
                        policy.label,
                        place.cell.replace("_", " "),
                        f"{row}: {method_named(method).label}",
                        " / ".join(f"{value:.2f}" for value in printed_cell(row, place)),
                        str(len(scores)),
                        estimate(mean_interval(scores) if scores else None, "{:.2f}"),
                        estimate(difference, "{:+.3f}"),
                        lossless(difference),
                    ]
                )
    return table(["policy", "cell", "row", "printed", "n", "ours, 95 %", DIFFERENCE, "lossless"], rows, left=3)


def _rivals(policies: Sequence[PolicyTable]) -> Block:
    rows = []
    for policy in policies:
        full = policy.item.rows[BASELINE].method.flops
        rivals = [cell.method for cell in policy.item.suite.cells if cell.equals == BASE]
        for method in (BASE, *rivals):
            against = None if method == BASE else policy.difference(BASE, method)
            difference = policy.difference(method, BASELINE)
            rows.append(
                [
                    policy.label,
                    method_named(method).label,
                    of_full(policy.item.rows[method].method.flops, full),
                    estimate(policy.item.rows[method].score, "{:.3f}"),
                    estimate(difference, "{:+.3f}"),
                    lossless(difference),
                    estimate(against, "{:+.3f}"),
                    "" if against is None else _WINNER.get(verdict(against), "not told apart"),
                ]
            )
    return table(["policy", "method", "FLOPs", SCORE, DIFFERENCE, "lossless", "BAC - this, 95 %", "wins"], rows, left=2)


_WINNER = {"better": "**BAC**", "worse": "**this**"}


def _dropout(policies: Sequence[PolicyTable]) -> list[Block]:
    pairs = _pairs(policies)
    if not pairs:
        return [Paragraph("No task has policies with it and without.")]
    rows = []
    for task, none, some in pairs:
        for policy in (none, some):
            features = policy.facts.features.get(BASE) if policy.facts else None
            rows.append(
                [
                    plain(task),
                    f"{policy.dropout:g}",
                    estimate(policy.item.rows[BASELINE].score, "{:.3f}"),
                    estimate(policy.loss, "{:+.3f}"),
                    estimate(_change(none, some), "{:+.3f}") if policy is some else "",
                    " to ".join(f"{policy.item.rows[name].jerk or 0:.3f}" for name in (BASELINE, BASE)),
                    "" if features is None else f"{features.own_roughness:.3f}",
                    "" if features is None else f"{features.rougher:+.3f}",
                    "" if features is None else f"{features.shift:.3f}",
                ]
            )
    header = ["task", "dropout", "score of full, 95 %", "BAC's difference, 95 %", "change by dropout, 95 %"]
    header += ["jerk of episodes, full to BAC", "roughness of full", "added by BAC", "centre shift by BAC"]
    about = (
        "The same demonstrations, steps and episodes. The change is that of BAC's difference, episode by episode. Roughness\n"
        "(mean second difference of executed actions) and centre shift are at recorded observations, in normalised units."
    )
    return [Paragraph(about), table(header, rows, left=2)]


def _pairs(policies: Sequence[PolicyTable]) -> list[tuple[str, PolicyTable, PolicyTable]]:
    """Of each task that has both: a policy without dropout, and one with."""
    none = {policy.task: policy for policy in policies if policy.dropout == 0}
    return [(policy.task, none[policy.task], policy) for policy in policies if policy.dropout and policy.task in none]


def _change(none: PolicyTable, some: PolicyTable) -> Estimate | None:
    """BAC's difference with dropout less that without, paired by episode."""
    changes = _changes(none, some)
    return _mean_change(changes) if changes else None


def _changes(none: PolicyTable, some: PolicyTable) -> list[float]:
    """The same of each episode."""
    lost = [
        {seed: score - full[seed] for seed, score in policy.scores(BASE).items() if seed in full}
        for policy in (none, some)
        for full in [policy.scores(BASELINE)]
    ]
    return [lost[1][seed] - lost[0][seed] for seed in lost[0] if seed in lost[1]]


def _mean_change(changes: Sequence[float]) -> Estimate:
    return difference_interval(changes, of_successes=False)
