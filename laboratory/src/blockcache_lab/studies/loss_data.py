"""Methods whose losses are known, and the model that the library predicts losses by: learnt from them, and judged.

`LossData` is one versioned file: a row for each method that was rolled out in pairs, with its features and its loss. What a
model looks at is chosen by leaving tasks out, and what is left over by tasks that the fit did not see gives a bound. Knows
nothing of torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import combinations
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from blockcache.errors import BlockcacheError
from blockcache.files import Count, Format, JsonFile, Limit, keys_of
from blockcache.measure.features import LEAST_ACTIONS, ActionFeatures
from blockcache.measure.statistics import Estimate, rank_correlation
from blockcache.results.losses import (
    FLOOR,
    MOST,
    NAMES,
    POLICY,
    TASKS,
    TERMS,
    LossModel,
    Prediction,
    Terms,
    terms_of,
)

LEAST_TASKS = 3
"""Tasks that tell methods apart: with fewer, nothing can be left out and still leave something to learn from."""
LEAST_LOST = 3
"""Methods whose whole interval lies below 0, so that a task is known to tell: one of twenty does so by chance."""
CERTAINTY = 0.9
ALLOWED = (0.03, 0.07)
"""Losses for which is looked up what a bound would take on a task that was left out."""
MOST_TERMS, AVERAGED = 3, 5
"""Terms of one sum, and how many of the best sums are averaged: which of them is the very best is a matter of chance."""


def sums_of(count: int) -> tuple[tuple[int, ...], ...]:
    """Places of the terms of every sum that is tried.

    Args:
        count: Of the terms that there are.
    """
    return tuple(chosen for size in range(1, MOST_TERMS + 1) for chosen in combinations(range(count), size))


def scene_of(task: str) -> str:
    """The name that a task shares with its variants (fewer steps, seen through a camera, demonstrated by others), which are
    left out together: one would tell of the other.

    Args:
        task: With what stands behind its @, if anything does.
    """
    return re.sub(r"(-image|-ph|-mh)$", "", task.partition("@")[0])


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

    @property
    def lost(self) -> float:
        return max(0.0, -self.difference.mean)


@dataclass(frozen=True)
class LossData(JsonFile):
    """All methods whose loss is known.

    observations, samples  that the features are of
    rows                   in any order
    left_out               policies with rollouts but without rows, "POLICY on TASK", each with the reason
    """

    observations: Count
    samples: Count
    rows: Annotated[tuple[LossRow, ...], Limit(1, 100_000)]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def told(self) -> dict[str, list[LossRow]]:
        """The rows of the tasks that tell methods apart, of chunks that have a roughness: of others nothing is promised.
        Data with too few such tasks are refused."""
        tasks: dict[str, list[LossRow]] = {}
        for row in self.rows:
            if row.actions >= LEAST_ACTIONS:
                tasks.setdefault(scene_of(row.task), []).append(row)
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
        return fit_model(self, tuple(self.told))


LossData.FORMAT = Format(
    "blockcache.losses",
    "data on losses",
    keys_of(LossData),
    optional=("left_out",),
    again="run 'blockcache paper losses' again",
)


@dataclass(frozen=True)
class Judgement:
    """How well a task is predicted by a model that did not see it.

    rank      rank correlation of predicted and measured losses
    highest   the highest that any prediction could have, as many methods lose the same
    factor    of its bounds, as the model has it that did not see the task
    promised  methods that are promised a bound
    covered   share of those that lose no more than it; None where nothing is promised
    shipped   the same for the factor of the model of all tasks, with the same predictions
    error     mean distance of predicted and measured losses, those above MOST counted as MOST
    taken     for each of ALLOWED the cheapest method whose bound is at most that, as `tune --loss` takes it; None is none
    found     each method with what is predicted of it
    """

    task: str
    methods: int
    rank: float
    highest: float
    factor: float
    promised: int
    covered: float | None
    shipped: float | None
    error: float
    taken: tuple[LossRow | None, ...]
    found: tuple[tuple[LossRow, Prediction], ...]


def fit_model(data: LossData, tasks: Sequence[str]) -> LossModel:
    """Non-negative weights of a few terms, and how much a bound lies above a prediction.

    Every task counts the same, however many methods it has.

    Args:
        data: All rows.
        tasks: Those to learn from.
    """
    weights, factor = _fit(data, tasks, TERMS)
    named = zip(NAMES, weights.tolist(), strict=True)
    return _model(data, tasks, {name: weight for name, weight in named if weight}, factor)


def judge(data: LossData, terms: Terms = TERMS) -> tuple[Judgement, ...]:
    """Every task that tells methods apart, predicted by all the others.

    Args:
        data: All rows.
        terms: What a loss may be a sum of, to try others than the library's.
    """
    judged, (_, shipped) = [], _fit(data, list(data.told), terms)
    for task, rows in data.told.items():
        others = [name for name in data.told if name != task]
        weights, factor = _fit(data, others, terms)
        model, learnt = _model(data, others, {}, factor), _Learnt.of(rows, terms)
        # a family that is among the others has this task besides: enough for a bound
        model = replace(model, tasks=dict.fromkeys(model.families, TASKS))
        predicted, lost = np.minimum(1.0, learnt.terms @ weights), np.array([row.lost for row in rows])
        found = [(row, _predicted(model, row, float(loss))) for row, loss in zip(rows, predicted, strict=True)]
        promised = _promised(found)
        by_shipped = replace(model, factor=shipped)
        allowed = [[row for row, bound in promised if bound <= most] for most in ALLOWED]
        judged.append(
            Judgement(
                task=task,
                methods=len(rows),
                rank=rank_correlation(predicted, lost),
                highest=rank_correlation(np.argsort(np.argsort(lost)), lost),
                factor=factor,
                promised=len(promised),
                covered=_covered(promised),
                shipped=_covered(_promised([(row, _predicted(by_shipped, row, one.loss)) for row, one in found])),
                error=float(np.abs(np.minimum(predicted, MOST) - learnt.lost).mean()),
                taken=tuple(min(rows, key=lambda row: row.cost, default=None) for rows in allowed),
                found=tuple(found),
            )
        )
    return tuple(judged)


def _predicted(model: LossModel, row: LossRow, loss: float) -> Prediction:
    """With a loss that other terms than the library's may have predicted."""
    unlike = model.predict(row.features, row.family, row.actions).unlike
    return Prediction(loss, None if unlike else model.bound(loss), unlike)


def _promised(found: Sequence[tuple[LossRow, Prediction]]) -> list[tuple[LossRow, float]]:
    return [(row, one.bound) for row, one in found if one.bound is not None and one.bound <= MOST]


def _covered(promised: Sequence[tuple[LossRow, float]]) -> float | None:
    return float(np.mean([row.lost <= bound for row, bound in promised])) if promised else None


def _fit(data: LossData, tasks: Sequence[str], terms: Terms) -> tuple[NDArray[np.float64], float]:
    """The weights of the terms and their roots, and the factor of a bound."""
    learnt = [_Learnt.of(data.told[task], terms) for task in tasks]
    # each task by what was chosen and fitted without it: what is left over is as for a task that nobody has seen
    ratios = [one.lost / (one.terms @ _fitted(others, _best(others)) + FLOOR) for one, others in _each(learnt)]
    shares = [np.full(len(found), 1 / len(found)) for found in ratios]
    level = 1 - (1 - CERTAINTY) * len(learnt) / (len(learnt) + 1)  # as if one more task had gone beyond all of these
    return _fitted(learnt, _best(learnt)), max(1.0, _quantile(np.concatenate(ratios), np.concatenate(shares), level))


def _model(data: LossData, tasks: Sequence[str], weights: dict[str, float], factor: float) -> LossModel:
    rows = [row for task in tasks for row in data.told[task]]
    columns = {word: [float(value(row.features, row.actions)) for row in rows] for word, value in POLICY.items()}
    return LossModel(
        about=data.about,
        chunks=data.observations * data.samples,
        families=tuple(sorted({row.family for row in rows})),
        ranges={word: (min(seen), max(seen)) for word, seen in columns.items()},
        weights=weights,
        factor=factor,
        tasks=dict(
            sorted(Counter(family for task in tasks for family in {row.family for row in data.told[task]}).items())
        ),
    )


@cache
def known_losses() -> LossData:
    """The data that the shipped model was learnt from."""
    return LossData.load(str(files("blockcache_lab") / "assets" / "losses.json"))


@dataclass(frozen=True, eq=False)
class _Learnt:
    """The methods of one task: their terms, (methods, terms), and what they lost, MOST where it was more."""

    terms: NDArray[np.float64]
    lost: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[LossRow], terms: Terms) -> _Learnt:
        lost = np.minimum([row.lost for row in rows], MOST)
        return cls(np.stack([terms_of(row.features, terms) for row in rows]), lost)


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
