"""What methods with known losses do to actions, and what that tells of a method whose loss is not known.

`LossData` is one versioned file: a row for each method that was rolled out in pairs, with its features and its loss. A
`LossModel` is fitted to it in a few lines, monotone in every feature: more roughness or more energy beyond the spread never
predicts less loss. What is left over by tasks that the fit did not see gives a bound. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from blockcache.errors import BlockcacheError
from blockcache.files import Count, Format, JsonFile, Limit, keys_of
from blockcache.measure.features import LEAST_ACTIONS, ActionFeatures
from blockcache.measure.statistics import Estimate, rank_correlation

LEAST_TASKS = 3
"""Tasks that tell methods apart: with fewer, nothing can be left out and still leave something to learn from."""
LEAST_LOST = 3
"""Methods whose whole interval lies below 0, so that a task is known to tell: one of twenty does so by chance."""
CERTAINTY = 0.9
FLOOR = 0.015
"""Added to a prediction before it is multiplied: what no feature sees costs a little, too."""
ALIKE = 2.0
"""A policy whose spread, roughness or chunk lies this factor outside the data is unlike all of it."""


class LossDataError(BlockcacheError):
    """Data that nothing can be learnt from."""


@dataclass(frozen=True)
class LossRow:
    """One method of one policy.

    task, family, policy, method  by name
    actions     of an executed chunk
    features    of its actions beside the policy's own
    difference  of the score to the full policy, paired: minus the loss
    """

    task: str
    family: str
    policy: str
    method: str
    actions: Count
    features: ActionFeatures
    difference: Estimate


@dataclass(frozen=True)
class LossData(JsonFile):
    """All methods whose loss is known.

    observations, samples  that the features are of
    rows                   in any order
    """

    observations: Count
    samples: Count
    rows: Annotated[tuple[LossRow, ...], Limit(1, 100_000)]

    @cached_property
    def told(self) -> dict[str, list[LossRow]]:
        """The rows of the tasks that tell methods apart; data with too few such tasks are refused."""
        tasks: dict[str, list[LossRow]] = {}
        for row in self.rows:
            tasks.setdefault(row.task, []).append(row)
        told = {
            task: rows for task, rows in tasks.items() if sum(row.difference.high < 0 for row in rows) >= LEAST_LOST
        }
        if len(told) < LEAST_TASKS:
            raise LossDataError(
                f"a prediction of losses needs {LEAST_TASKS} tasks that tell methods apart, got {len(told)}"
                f" ({', '.join(told) or 'none'}); roll out more methods, or tasks that forgive less"
            )
        return told

    @cached_property
    def model(self) -> LossModel:
        """The model of all tasks that tell methods apart."""
        return LossModel(self, tuple(self.told))


LossData.FORMAT = Format(
    "blockcache.losses", "data on losses", keys_of(LossData), again="run 'blockcache paper losses' again"
)


@dataclass(frozen=True)
class Prediction:
    """What a method is likely to lose of a score up to 1.

    loss     the best guess; its order can be trusted more than its size
    bound    it loses at most this with 90 % certainty; None where the policy is unlike the data
    unlike   why there is no bound
    """

    loss: float
    bound: float | None
    unlike: str = ""


@dataclass(frozen=True)
class Judgement:
    """How well a task is predicted by a model that did not see it.

    rank      rank correlation of predicted and measured losses
    highest   the highest that any prediction could have, as many methods lose the same
    covered   share of the methods that lose no more than their bound
    """

    task: str
    methods: int
    rank: float
    highest: float
    covered: float


class LossModel:
    """Non-negative weights of the features, and how much a bound lies above a prediction.

    Every task counts the same, however many methods it has.

    Args:
        data: All rows.
        tasks: Those to learn from.
    """

    def __init__(self, data: LossData, tasks: Sequence[str]) -> None:
        self.rows = {task: data.told[task] for task in tasks}
        self.weights = _fitted(self.rows)
        # each task by the weights of the others: what is left over is as for a task that nobody has seen
        ratios, shares = [], []
        for task, rows in self.rows.items():
            others = _fitted({name: found for name, found in self.rows.items() if name != task})
            ratios.append(_losses(rows) / (_terms(rows) @ others + FLOOR))
            shares.append(np.full(len(rows), 1 / len(rows)))
        self.factor = max(1.0, _quantile(np.concatenate(ratios), np.concatenate(shares), CERTAINTY))

    def predict(self, features: ActionFeatures, family: str, actions: int) -> Prediction:
        """What a method with these features is likely to lose.

        Args:
            features: Of the method on its policy.
            family: Of the policy.
            actions: Of an executed chunk.
        """
        loss = float(_term(features) @ self.weights)
        if reason := self._unlike(features, family, actions):
            return Prediction(min(1.0, loss), None, reason)
        return Prediction(min(1.0, loss), min(1.0, self.factor * (loss + FLOOR)))

    def _unlike(self, features: ActionFeatures, family: str, actions: int) -> str:
        """Why nothing can be promised for the policy, or nothing."""
        rows = [row for found in self.rows.values() for row in found]
        families = sorted({row.family for row in rows})
        if family not in families:
            return f"no policy of family {family} is in the data, only {', '.join(families)}"
        if actions < LEAST_ACTIONS:
            return f"a chunk of {actions} has no roughness"
        known = [row.actions for row in rows]
        if not min(known) / ALIKE <= actions <= max(known) * ALIKE:
            return f"it executes {actions} actions of a chunk, policies in the data {min(known)} to {max(known)}"
        for name in ("own_spread", "own_roughness"):
            value, seen = getattr(features, name), [getattr(row.features, name) for row in rows]
            if not min(seen) / ALIKE <= value <= max(seen) * ALIKE:
                word = name.replace("own_", "")
                return f"its actions' {word} is {value:.3g}, that of policies in the data {min(seen):.3g} to {max(seen):.3g}"
        return ""


def judge(data: LossData) -> tuple[Judgement, ...]:
    """Every task that tells methods apart, predicted by all the others."""
    found = []
    for task, rows in data.told.items():
        model = LossModel(data, [name for name in data.told if name != task])
        lost, predicted = _losses(rows), _terms(rows) @ model.weights
        bound = np.minimum(1.0, model.factor * (predicted + FLOOR))
        found.append(
            Judgement(
                task=task,
                methods=len(rows),
                rank=rank_correlation(predicted, lost),
                highest=rank_correlation(np.argsort(np.argsort(lost)), lost),
                covered=float((lost <= bound).mean()),
            )
        )
    return tuple(found)


@cache
def shipped_losses() -> LossData:
    """The data that ships with the package."""
    return LossData.load(str(files("blockcache") / "assets" / "losses.json"))


def predict_loss(features: ActionFeatures, family: str, actions: int) -> Prediction:
    """What a method is likely to lose, by the data that ships with the package; see `LossModel.predict`."""
    return shipped_losses().model.predict(features, family, actions)


def _term(features: ActionFeatures) -> NDArray[np.float64]:
    """What a loss is a weighted sum of. Both cost most where they begin, so their roots count."""
    beyond, rougher = max(0.0, features.beyond_spread), max(0.0, features.rougher)
    return np.array([beyond, math.sqrt(beyond), math.sqrt(rougher)])


def _terms(rows: Sequence[LossRow]) -> NDArray[np.float64]:
    return np.stack([_term(row.features) for row in rows])


def _losses(rows: Sequence[LossRow]) -> NDArray[np.float64]:
    return np.array([max(0.0, -row.difference.mean) for row in rows])


def _fitted(tasks: dict[str, list[LossRow]]) -> NDArray[np.float64]:
    scaled = [(_terms(rows) / math.sqrt(len(rows)), _losses(rows) / math.sqrt(len(rows))) for rows in tasks.values()]
    weights: NDArray[np.float64] = nnls(np.concatenate([a for a, _ in scaled]), np.concatenate([b for _, b in scaled]))[
        0
    ]
    return weights


def _quantile(values: NDArray[np.float64], shares: NDArray[np.float64], level: float) -> float:
    """The smallest value that at least so much of the weight does not exceed."""
    order = np.argsort(values)
    reached = np.cumsum(shares[order]) / shares.sum()
    return float(values[order][np.searchsorted(reached, level - 1e-12)])
