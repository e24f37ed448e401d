"""Figures of one file of rollouts: results of `blockcache eval`, or what `examples/halving.py` wrote.

Knows nothing of suites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockcache.errors import FileError
from blockcache.files import read_json
from blockcache.measure.statistics import Estimate, mean_interval
from blockcache.results.rollouts import BASELINE, SETTLED, Results
from blockcache_lab.studies.suite_results import paired

Scores = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class RolloutFigures:
    """The scores that one file holds.

    Args:
        records: The directory that holds the directories of records.
        name: Of the file, as `DIRECTORY/FILE`, without its ending.
        scores: By method and seed, of episodes that ended.
        tuning: The same on tuning seeds, where methods were chosen by halving.
        stopped: Whether episodes were run one after another until they sufficed.
    """

    records: Path
    name: str
    scores: Scores
    tuning: Scores
    stopped: bool = False

    @classmethod
    def load(cls, records: Path, name: str) -> RolloutFigures:
        """Read either kind of file.

        Args:
            records: The directory that holds the directories of records.
            name: Of the file, as `DIRECTORY/FILE`, without its ending.
        """
        path = records / f"{name}.json"
        content = read_json(path, "results file")
        if content.get("format") == "halving":
            rounds = {
                method: found for one in content["rounds"] for method, found in one.items()
            }  # the last one counts
            fresh = {**content.get("fresh", {}), BASELINE: content.get("full", {})}
            return cls(records, name, _by_seed(fresh), _by_seed(rounds))
        results = Results.load(path)
        runs = {method.name: results.of(method.name).values() for method in results.methods}
        scores = {
            method: {record.seed: record.score for record in run if record.score is not None}
            for method, run in runs.items()
        }
        return cls(records, name, scores, {}, bool(results.setting.get(SETTLED)))

    def figure(self, method: str, quantity: str, other: str | None = None) -> str:
        """As a page shows it.

        Args:
            method: By its name.
            quantity: `score`, `tuning-score`, `n`, `difference` (to the file's full policy) or `against` (to `other`).
            other: A method of this file, or METHOD@DIRECTORY/FILE.
        """
        found = _of(self.name, self.tuning if quantity == "tuning-score" else self.scores, method)
        if quantity == "n":
            return str(len(found))
        if quantity in ("score", "tuning-score"):
            return mean_interval(list(found.values())).text("{:.3f}")
        if quantity == "difference" or (quantity == "against" and other is not None):
            return self._difference(found, other or BASELINE).text("{:+.3f}")
        raise FileError(
            f"no quantity {quantity!r} of {self.name}, expected one of score, tuning-score, n, difference, against METHOD"
        )

    def _difference(self, found: Mapping[int, float], other: str) -> Estimate:
        method, _, where = other.partition("@")
        file = RolloutFigures.load(self.records, where) if where else self
        value = paired(found, _of(file.name, file.scores, method), self.stopped or file.stopped)
        if value is None:
            raise FileError(f"{self.name} and {other} have no episode in common")
        return value


def _of(name: str, scores: Scores, method: str) -> Mapping[int, float]:
    if not scores.get(method):
        raise FileError(f"{name} has no scores of {method!r}, expected one of {', '.join(scores) or 'none'}")
    return scores[method]


def _by_seed(scores: Mapping[str, Mapping[str, float]]) -> Scores:
    return {name: {int(seed): score for seed, score in found.items()} for name, found in scores.items()}
