"""Suite main of further policies, for other tasks or this one; those of a task are taken together.

From the files of `blockcache paper suite main` only. An environment seed counts once in an interval, however many policies met it:
its differences are averaged over the policies first, because they are not independent of one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.files import PathLike
from blockcache.measure.statistics import Estimate, difference_interval
from blockcache.report.document import Paragraph, Section, Table, plain, table
from blockcache.report.methods import DIFFERENCE, SCORE, estimate, lossless, of_full
from blockcache.results.rollouts import BASELINE, Results
from blockcache_lab.pages.suite_parts import verdict
from blockcache_lab.studies.suite_results import SuiteResults
from blockcache_lab.studies.suites import Cell, suite_of


@dataclass(frozen=True, eq=False)
class TaskPolicies:
    """One task's policies, each with its results in suite main. The cells of all of them stand in the same order."""

    name: str
    policies: tuple[SuiteResults, ...]
    directories: tuple[str, ...]  # where each one's results were

    @cached_property
    def cells(self) -> tuple[tuple[Cell, ...], ...]:
        """Each of the suite's cells, as it came out for every policy: equal FLOPs may mean DDIM-16 here, DDIM-17 there."""
        columns = [item.suite.cells for item in self.policies]
        return tuple(zip(*columns, strict=True))

    def difference(self, found: Sequence[str], baseline: Sequence[str]) -> Estimate | None:
        """Of scores, pair by pair; `found` and `baseline` name a method for each policy. `n` counts episodes."""
        by_seed: dict[int, list[float]] = {}
        scores: list[float] = []
        for item, one, other in zip(self.policies, found, baseline, strict=True):
            against = item.results.of(other)
            for seed, record in item.results.of(one).items():
                pair = [met.score for met in (record, against.get(seed)) if met and met.score is not None]
                if len(pair) == 2:
                    by_seed.setdefault(seed, []).append(pair[0] - pair[1])
                    scores += pair
        if not by_seed:
            return None
        means = [float(np.mean(differences)) for differences in by_seed.values()]
        return difference_interval(means, of_successes=set(scores) <= {0.0, 1.0})


def load_other_policies(directories: Sequence[PathLike]) -> tuple[TaskPolicies, ...]:
    """Suite main of every directory, brought together by task.

    Args:
        directories: Each with the `main.json` of one policy.
    """
    found: dict[str, dict[str, SuiteResults]] = {}
    for directory in directories:
        path = Path(directory) / "main.json"
        results = Results.load(path)
        found.setdefault(results.task["name"], {})[str(directory)] = SuiteResults(suite_of(results, path), results)
    for name, items in found.items():
        weights = {item.results.policy["fingerprint"]["weights"] for item in items.values()}
        if len(weights) < len(items):
            raise FileError(f"two of the directories hold results of the same policy for task {name}; give each once")
        alike = {
            (item.suite.quick, len(item.suite.cells), tuple(sorted(item.results.of(BASELINE))))
            for item in items.values()
        }
        if len(alike) > 1:
            raise FileError(
                f"the results for task {name} in {', '.join(items)} are not of the same episodes and methods; run one again"
            )
    return tuple(TaskPolicies(name, tuple(items.values()), tuple(items)) for name, items in found.items())


def other_policies(tasks: Sequence[TaskPolicies]) -> Section:
    """The page's section on them."""
    about = Paragraph(
        "Suite main again. Where a task has no score but success, the score is that. A task's policies met the same episodes.\n"
        "Differences are over all of them; in the intervals an episode counts once, however many policies met it, so what further\n"
        "training seeds would bring is not in them. A task in which every method succeeds tells none of them apart."
    )
    quick = Paragraph("**Some are from a quick run: a few shortened rollouts that mean nothing.**")
    is_quick = any(item.suite.quick for task in tasks for item in task.policies)
    policies = Section("Their policies in full precision", (_policies(tasks),))
    return Section("Other tasks and policies", (about, *([quick] if is_quick else []), policies, *map(_task, tasks)))


def _policies(tasks: Sequence[TaskPolicies]) -> Table:
    rows = []
    for task in tasks:
        for item, directory in zip(task.policies, task.directories, strict=True):
            fingerprint, full = item.results.policy["fingerprint"], item.rows[BASELINE]
            blocks, widths = fingerprint["blocks"] or (), fingerprint["widths"] or {}
            sizes = [plain(task.name), str(len(blocks)), str(widths.get("width", "?"))]
            count, score = "0" if full.score is None else str(full.score.n), estimate(full.score, "{:.2f}")
            rows.append([*sizes, count, score, str(full.failed), f"`{item.command(directory)}`"])
    return table(["task", "blocks", "width", "n", SCORE, "failed", "command"], rows)


def _task(task: TaskPolicies) -> Section:
    header = ["method", "rollouts", "score, policy by policy", DIFFERENCE, "lossless", "GFLOP", "of full"]
    header += ["BAC - this at equal FLOPs, 95 %", "wins"]
    first = task.policies[0].results
    about = f"At most {first.task['max_steps']} steps; success: {plain(first.task['success'])}."
    rows = {tuple(cell.method for cell in cells): _row(task, cells) for cells in task.cells}  # each once
    return Section(plain(task.name), (Paragraph(about), table(header, rows.values())))


def _row(task: TaskPolicies, cells: Sequence[Cell]) -> list[str]:
    names = [cell.method for cell in cells]
    runs = [item.rows[name] for item, name in zip(task.policies, names, strict=True)]
    full = [item.rows[BASELINE].method.flops for item in task.policies]
    is_full = all(name == BASELINE for name in names)
    difference = None if is_full else task.difference(names, [BASELINE] * len(names))
    rivals = [cell.equals for cell in cells if cell.equals is not None]
    against = task.difference(rivals, names) if len(rivals) == len(names) else None
    flops = np.mean([run.method.flops for run in runs])
    return [
        " / ".join(dict.fromkeys(method_named(name).label for name in names))
        + ("" if runs[0].method.shares_all_noise else " †"),
        str(sum(0 if run.score is None else run.score.n for run in runs)),
        ", ".join("-" if run.score is None else f"{run.score.mean:.2f}" for run in runs),
        estimate(difference, "{:+.3f}"),
        lossless(difference),
        f"{flops / 1e9:.3f}",
        of_full(float(flops), float(np.mean(full))),
        estimate(against, "{:+.3f}"),
        "" if against is None else {"better": "**BAC**", "worse": "**this**"}.get(verdict(against), "not told apart"),
    ]
