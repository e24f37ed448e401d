"""The paper's protocol: of each training run the best and the mean of its last checkpoints, then the mean over the runs.

From results files, one for each checkpoint. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from blockcache.errors import FileError
from blockcache.results.rollouts import Results


@dataclass(frozen=True)
class Protocol:
    """One method's scores: of each run, by its name, those of its checkpoints in the order of training."""

    method: str
    scores: Mapping[str, tuple[float, ...]]

    @property
    def best(self) -> float:
        """The paper's "max performance", averaged over the runs."""
        return float(np.mean([max(found) for found in self.scores.values()]))

    @property
    def mean(self) -> float:
        """The paper's "average of last 10 checkpoints", averaged over the runs."""
        return float(np.mean([np.mean(found) for found in self.scores.values()]))


def protocol(runs: Mapping[str, Sequence[Results]], least: float | None = None) -> tuple[Protocol, ...]:
    """Each method's figures.

    Args:
        runs: By name, the results of each run's checkpoints: all of one task, with the same methods and episodes.
        least: Count an episode that scores as much as 1 and any other as 0; without it scores are as they are.
    """
    files = [found for results in runs.values() for found in results]
    alike = {
        (found.task["name"], tuple(method.name for method in found.methods), frozenset(_seeds(found)))
        for found in files
    }
    if len(alike) != 1:
        raise FileError(
            f"checkpoints are compared on the same task, methods and episodes; {len(files)} results files have "
            f"{len(alike)} kinds of them; run those that differ again"
        )
    return tuple(
        Protocol(
            method.name,
            {name: tuple(_mean(found, method.name, least) for found in results) for name, results in runs.items()},
        )
        for method in files[0].methods
    )


def _mean(results: Results, method: str, least: float | None) -> float:
    """Over the episodes that ended."""
    scores = [record.score for record in results.of(method).values() if record.score is not None]
    if not scores:
        raise FileError(f"no episode of {method} ended; see the errors in its results file, and run it again")
    return float(np.mean(scores if least is None else [score >= least for score in scores]))


def _seeds(results: Results) -> set[int]:
    return {seed for method in results.methods for seed in results.of(method.name)}
