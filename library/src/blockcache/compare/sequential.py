"""An evaluation that goes on in groups of pairs until every verdict is settled: time goes where it decides.

What is finished is in the evaluation's store, so a run that is stopped in the middle of a group goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockcache.compare.evaluation import Evaluation
from blockcache.compare.jobs import Backend, one_by_one
from blockcache.progress import progress_bar
from blockcache.results.rollouts import BASELINE, SETTLED, Results
from blockcache.results.summary import summarise


def run_until_settled(evaluation: Evaluation, backend: Backend = one_by_one, *, progress: bool = True) -> Results:
    """Groups of pairs of each method until it is shown to be lossless, or to lose, or until all seeds are used.

    Args:
        evaluation: Its seeds are the most that a method gets.
        backend: Runs the rollouts.
        progress: Whether to show a bar.
    """
    parts, waiting = list[Results](), dict(evaluation.candidates)
    with progress_bar(evaluation.groups, "pairs", unit="group", disable=not progress) as bar:
        for seeds in bar:
            parts.append(replace(evaluation, candidates=waiting, seeds=seeds).run(backend, progress=False))
            rows = {row.method.name: row.difference for row in summarise(_together(parts))}
            waiting = {
                name: candidate
                for name, candidate in waiting.items()
                if name == BASELINE or (found := rows[name]) is None or not found.settled
            }
            bar.set_postfix_str(f"{len(waiting) - 1} not settled")
            if set(waiting) == {BASELINE}:
                break
    return _together(parts)


def _together(parts: Sequence[Results]) -> Results:
    """One after another; the first has all methods."""
    first = parts[0]
    order = [method.name for method in first.methods]
    records = sorted((item for part in parts for item in part.records), key=lambda item: order.index(item.method))
    clocked = sorted((item for part in parts for item in part.clocked), key=lambda item: order.index(item.method))
    setting = {**first.setting, "rollouts": sum(part.setting["rollouts"] for part in parts), SETTLED: True}
    return replace(first, setting=setting, records=tuple(records), clocked=tuple(clocked))
