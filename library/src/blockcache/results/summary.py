"""One row for each method of a results file: means, paired differences to the full policy, and smoothness.

Rollouts that failed, here or in their pair, are left out and counted. Knows nothing of torch or of tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from blockcache.measure.sequences import valid_interval
from blockcache.measure.statistics import Estimate, McNemar, mcnemar, mean_interval, paired_difference
from blockcache.results.rollouts import BASELINE, SETTLED, MethodRun, Record, Results


@dataclass(frozen=True)
class MethodSummary:
    """`difference` and `discordant` are None for the full policy itself, and every figure where no rollout is left."""

    method: MethodRun
    failed: int
    score: Estimate | None
    success: Estimate | None
    difference: Estimate | None  # of the score, to the full policy, same seed and noise
    discordant: McNemar | None  # of success
    jerk: float | None
    jump: float | None

    @property
    def count(self) -> int:
        """How many rollouts the score is of."""
        return 0 if self.score is None else self.score.n


def summarise(results: Results) -> tuple[MethodSummary, ...]:
    """Differences of rollouts that ended when they sufficed have intervals that allow for that.

    Args:
        results: Rollouts of several methods, the full policy among them.
    """
    baseline, stopped = results.of(BASELINE), bool(results.setting.get(SETTLED))
    return tuple(_row(method, results.of(method.name), baseline, stopped) for method in results.methods)


def most_rollouts(rows: Iterable[MethodSummary]) -> dict[str, MethodSummary]:
    """Each method's row by name; of several of one name, the first with the most rollouts.

    Args:
        rows: Of one or of several results files.
    """
    found: dict[str, MethodSummary] = {}
    for row in rows:
        if row.method.name not in found or row.count > found[row.method.name].count:
            found[row.method.name] = row
    return found


def _row(method: MethodRun, records: dict[int, Record], baseline: dict[int, Record], stopped: bool) -> MethodSummary:
    done = [record for record in records.values() if record.error is None]
    pairs = [(a, b) for seed, a in records.items() if (b := baseline.get(seed)) and a.error is b.error is None]
    compared = method.name != BASELINE and len(pairs) > 0
    found, expected = [a for a, _ in pairs], [b for _, b in pairs]
    one, other = _known(found, "score"), _known(expected, "score")
    interval = valid_interval(np.subtract(one, other)) if stopped and compared else None
    return MethodSummary(
        method=method,
        failed=len(records) - len(done),
        score=mean_interval(_known(done, "score")) if done else None,
        success=mean_interval(_known(done, "success")) if done else None,
        difference=interval or (paired_difference(one, other) if compared else None),
        discordant=mcnemar(_known(found, "success"), _known(expected, "success")) if compared else None,
        jerk=float(np.mean(jerks)) if (jerks := _known(done, "jerk")) else None,
        jump=float(np.mean(jumps)) if (jumps := _known(done, "jump")) else None,
    )


def _known(records: list[Record], figure: str) -> list[float]:
    """One figure of those records that have it; a finished rollout has a score and a success."""
    return [value for record in records if (value := getattr(record, figure)) is not None]
