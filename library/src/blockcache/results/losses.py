"""What methods with known losses do to actions, and what that tells of a method whose loss is not known.

`LossData` is one versioned file: a row for each method that was rolled out in pairs, with its features and its loss. A
`LossModel` is fitted to it in a few lines, monotone in every feature: more roughness or more energy beyond the spread never
predicts less loss. What it looks at is chosen by leaving tasks out, and what is left over by tasks that the fit did not see
gives a bound. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import combinations
from typing import Annotated, TypeAlias

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
ALLOWED = (0.03, 0.07)
"""Losses for which is looked up what a bound would take on a task that was left out."""
FEWER = 4
"""What was measured on fewer chunks than the data, by more than this factor, scatters too much for a promise."""
ALIKE = 2.0
"""A policy whose spread, roughness or chunk lies this factor outside the data is unlike all of it."""


MOST_TERMS, AVERAGED = 3, 5
"""Terms of one sum, and how many of the best sums are averaged: which of them is the very best is a matter of chance."""
Terms: TypeAlias = Mapping[str, Callable[[ActionFeatures], float]]
TERMS: Terms = {
    "energy beyond spread": lambda of: of.beyond_spread,
    "added roughness": lambda of: of.rougher,
    "added roughness over the policy's own": lambda of: of.rougher / of.own_roughness if of.own_roughness else 0.0,
    "spread above the policy's own": lambda of: of.wider,
    "centre shift": lambda of: of.shift,
    "centre shift over the policy's spread": lambda of: of.shift / of.own_spread if of.own_spread else 0.0,
}
"""What a loss may be a weighted sum of, each as it is or its root, and 0 where it is below 0."""


def names_of(terms: Terms) -> tuple[str, ...]:
    """Each term as it is, then each root."""
    return (*terms, *(f"root of {name}" for name in terms))


def sums_of(count: int) -> tuple[tuple[int, ...], ...]:
    """Places of the terms of every sum that is tried, of so many."""
    return tuple(chosen for size in range(1, MOST_TERMS + 1) for chosen in combinations(range(count), size))


class LossDataError(BlockcacheError):
    """Data that nothing can be learnt from."""


@dataclass(frozen=True)
class LossRow:
    """One method of one policy.

    task, family, policy, method  by name
    ran         a digest of the sampler and of what is reused when
    cost        the share of the full policy's FLOPs
    actions     of an executed chunk
    features    of its actions beside the policy's own
    difference  of the score to the full policy, paired: minus the loss
    """

    task: str
    family: str
    policy: str
    method: str
    ran: str
    cost: float
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
        for row in self.rows:  # a task and its harder variants are one: leaving out but one of them would tell of it
            tasks.setdefault(row.task.partition("@")[0], []).append(row)
        told = {
            rows[0].task: rows for rows in tasks.values() if sum(row.difference.high < 0 for row in rows) >= LEAST_LOST
        }
        if len(told) < LEAST_TASKS:
            raise LossDataError(
                f"a prediction of losses needs {LEAST_TASKS} tasks that tell methods apart, got {len(told)}"
                f" ({', '.join(told) or 'none'}); roll out more methods, or tasks that forgive less"
            )
        return told

    @property
    def about(self) -> str:
        """What can be learnt from, in words."""
        rows = [row for found in self.told.values() for row in found]
        policies, families = len({row.policy for row in rows}), sorted({row.family for row in rows})
        who = f"{len(rows)} methods of {policies} policies ({', '.join(families)})"
        return f"{who} with paired rollouts on {', '.join(self.told)}"

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
    where    the policy lies beside those in the data
    """

    loss: float
    bound: float | None
    unlike: str = ""
    where: str = ""

    @property
    def words(self) -> str:
        """What is promised."""
        if self.bound is None:
            return f"nothing is promised: {self.unlike}"
        return f"with 90 % certainty it loses at most {self.bound:.3f}"


@dataclass(frozen=True)
class Judgement:
    """How well a task is predicted by a model that did not see it.

    rank      rank correlation of predicted and measured losses
    highest   the highest that any prediction could have, as many methods lose the same
    covered   share of the methods that lose no more than their bound
    error     mean distance of predicted and measured losses
    taken     for each of ALLOWED the cheapest method whose bound is at most that, as `tune --loss` takes it; None is none
    """

    task: str
    methods: int
    rank: float
    highest: float
    covered: float
    error: float
    taken: tuple[LossRow | None, ...]


class LossModel:
    """Non-negative weights of a few terms, and how much a bound lies above a prediction.

    Every task counts the same, however many methods it has.

    Args:
        data: All rows.
        tasks: Those to learn from.
        terms: What a loss may be a sum of.
    """

    def __init__(self, data: LossData, tasks: Sequence[str], terms: Terms = TERMS) -> None:
        self.rows, self.terms = {task: data.told[task] for task in tasks}, terms
        learnt = [_Learnt.of(rows, terms) for rows in self.rows.values()]
        self.chunks = data.observations * data.samples
        self.weights = _fitted(learnt, _best(learnt))
        # each task by what was chosen and fitted without it: what is left over is as for a task that nobody has seen
        ratios = [one.lost / (one.terms @ _fitted(others, _best(others)) + FLOOR) for one, others in _each(learnt)]
        shares = [np.full(len(found), 1 / len(found)) for found in ratios]
        level = 1 - (1 - CERTAINTY) * len(learnt) / (
            len(learnt) + 1
        )  # as if one more task had gone beyond all of these
        self.factor = max(1.0, _quantile(np.concatenate(ratios), np.concatenate(shares), level))

    @property
    def formula(self) -> str:
        """The prediction in words."""
        terms = zip(self.weights, names_of(self.terms), strict=True)
        return " + ".join(f"{weight:.3f} x {name}" for weight, name in terms if weight >= 5e-4)

    def loss(self, features: ActionFeatures) -> float:
        """The best guess."""
        return min(1.0, float(_terms(features, self.terms) @ self.weights))

    def bound(self, loss: float) -> float:
        """What a method of a policy like those in the data loses at most, given its best guess."""
        return min(1.0, self.factor * (loss + FLOOR))

    def predict(self, features: ActionFeatures, family: str, actions: int, chunks: int | None = None) -> Prediction:
        """What a method with these features is likely to lose.

        Args:
            features: Of the method on its policy.
            family: Of the policy.
            actions: Of an executed chunk.
            chunks: That the features are of; None is as many as in the data.
        """
        loss, reason = self.loss(features), self._unlike(features, family, actions, chunks or self.chunks)
        where = ", ".join(
            f"{word} {value:.3g} (policies in the data {low:.3g} to {high:.3g})"
            for word, (value, low, high) in self._beside(features, actions).items()
        )
        return Prediction(loss, None if reason else self.bound(loss), reason, f"family {family}, {where}")

    def _beside(self, features: ActionFeatures, actions: int) -> dict[str, tuple[float, float, float]]:
        """What the policy is like, each with the least and the most of those in the data."""
        rows = [row for found in self.rows.values() for row in found]
        columns: dict[str, tuple[float, list[float]]] = {
            "executed actions of a chunk": (actions, [row.actions for row in rows]),
            "its actions' spread": (features.own_spread, [row.features.own_spread for row in rows]),
            "its actions' roughness": (features.own_roughness, [row.features.own_roughness for row in rows]),
        }
        return {word: (value, min(seen), max(seen)) for word, (value, seen) in columns.items()}

    def _unlike(self, features: ActionFeatures, family: str, actions: int, chunks: int) -> str:
        """Why nothing can be promised for the policy, or nothing."""
        families = sorted({row.family for found in self.rows.values() for row in found})
        if family not in families:
            return f"no policy of family {family} is in the data, only {', '.join(families)}"
        if actions < LEAST_ACTIONS:
            return f"a chunk of {actions} has no roughness"
        for word, (value, low, high) in self._beside(features, actions).items():
            if not low / ALIKE <= value <= high * ALIKE:
                return f"{word}: {value:.3g}, of policies in the data {low:.3g} to {high:.3g}"
        if chunks < self.chunks / FEWER:
            return f"it was measured on {chunks} chunks, methods in the data on {self.chunks}; give it more"
        return ""


def judge(data: LossData, terms: Terms = TERMS) -> tuple[Judgement, ...]:
    """Every task that tells methods apart, predicted by all the others."""
    found = []
    for task, rows in data.told.items():
        model = LossModel(data, [name for name in data.told if name != task], terms)
        lost, predicted = _lost(rows), np.array([model.loss(row.features) for row in rows])
        bounds = [(row, model.predict(row.features, row.family, row.actions).bound) for row in rows]
        allowed = [[row for row, bound in bounds if bound is not None and bound <= most] for most in ALLOWED]
        found.append(
            Judgement(
                task=task,
                methods=len(rows),
                rank=rank_correlation(predicted, lost),
                highest=rank_correlation(np.argsort(np.argsort(lost)), lost),
                covered=float(
                    np.mean([actual <= model.bound(loss) for actual, loss in zip(lost, predicted, strict=True)])
                ),
                error=float(np.abs(predicted - lost).mean()),
                taken=tuple(min(found, key=lambda row: row.cost, default=None) for found in allowed),
            )
        )
    return tuple(found)


@cache
def shipped_losses() -> LossData:
    """The data that ships with the package."""
    return LossData.load(str(files("blockcache") / "assets" / "losses.json"))


def predict_loss(features: ActionFeatures, family: str, actions: int, chunks: int | None = None) -> Prediction:
    """What a method is likely to lose, by the data that ships with the package; see `LossModel.predict`."""
    return shipped_losses().model.predict(features, family, actions, chunks)


def _terms(features: ActionFeatures, terms: Terms) -> NDArray[np.float64]:
    """The value of each of `names_of`."""
    values = np.array([max(0.0, term(features)) for term in terms.values()])
    return np.concatenate((values, np.sqrt(values)))


@dataclass(frozen=True, eq=False)
class _Learnt:
    """The methods of one task: their terms, (methods, terms), and what they lost."""

    terms: NDArray[np.float64]
    lost: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[LossRow], terms: Terms) -> _Learnt:
        return cls(np.stack([_terms(row.features, terms) for row in rows]), _lost(rows))


def _lost(rows: Sequence[LossRow]) -> NDArray[np.float64]:
    return np.array([max(0.0, -row.difference.mean) for row in rows])


def _fitted(tasks: Sequence[_Learnt], sums: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """A weight for each term, averaged over the sums."""
    weights = np.zeros(tasks[0].terms.shape[1])
    lost = np.concatenate([one.lost / math.sqrt(len(one.lost)) for one in tasks])
    for terms in sums:
        places = list(terms)
        values = np.concatenate([one.terms[:, places] / math.sqrt(len(one.lost)) for one in tasks])
        weights[places] += nnls(values, lost)[0] / len(sums)
    return weights


def _each(tasks: Sequence[_Learnt]) -> list[tuple[_Learnt, Sequence[_Learnt]]]:
    """Each task with the others; one that is alone with itself."""
    return [(one, [other for other in tasks if other is not one] or tasks) for one in tasks]


def _best(tasks: Sequence[_Learnt]) -> list[tuple[int, ...]]:
    """The sums with the least mean absolute error for tasks that were left out, each task counting the same."""
    pairs = _each(tasks)

    def error(terms: tuple[int, ...]) -> float:
        return float(np.mean([np.abs(one.terms @ _fitted(others, [terms]) - one.lost).mean() for one, others in pairs]))

    return sorted(sums_of(tasks[0].terms.shape[1]), key=error)[:AVERAGED]


def _quantile(values: NDArray[np.float64], shares: NDArray[np.float64], level: float) -> float:
    """The smallest value that at least so much of the weight does not exceed."""
    order = np.argsort(values)
    reached = np.cumsum(shares[order]) / shares.sum()
    return float(values[order][np.searchsorted(reached, level - 1e-12)])
