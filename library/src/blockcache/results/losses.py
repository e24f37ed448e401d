"""What a method is likely to lose, told from what it does to actions.

A `LossModel` is one small versioned file: a weighted sum of features, monotone in every one of them, so that more roughness
or more energy beyond the spread never predicts less loss; and how much a bound lies above it. The laboratory fits it to
methods whose losses are known (`blockcache paper losses`). Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockcache.files import Count, Format, JsonFile, Limit, Name, Positive, keys_of
from blockcache.measure.features import LEAST_ACTIONS, ActionFeatures

FLOOR = 0.015
"""Added to a prediction before it is multiplied: what no feature sees costs a little, too."""
MOST = 0.3
"""Losses above it are learnt as it: how much more a method loses decides nothing. No bound above it is promised."""
FEWER = 4
"""What was measured on fewer chunks than the data, by more than this factor, scatters too much for a promise."""
ALIKE = 2.0
"""A policy whose spread or roughness lies this factor outside the data is unlike all of it."""
TASKS = 2
"""Of a family, so that a bound of it is promised: with a single one left out nothing is known of the family, and no bound of
it can be judged."""

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
NAMES = (*TERMS, *(f"root of {name}" for name in TERMS))
_ACTIONS = "executed actions of a chunk"
POLICY: Mapping[str, Callable[[ActionFeatures, int], float]] = {
    _ACTIONS: lambda of, actions: actions,
    "its actions' spread": lambda of, actions: of.own_spread,
    "its actions' roughness": lambda of, actions: of.own_roughness,
}
"""What tells whether a policy is like those in the data."""


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
        if self.bound > MOST:
            return f"nothing is promised: it may well lose more than {MOST:g}"
        return f"with 90 % certainty it loses at most {self.bound:.3f}"


@dataclass(frozen=True)
class LossModel(JsonFile):
    """What was learnt from methods whose losses are known.

    about     what it was learnt from, in words
    chunks    that the features of a method in the data are of
    families  of the policies in the data
    ranges    by name of POLICY, the least and the most of the policies in the data
    weights   by name of NAMES, 0 or more; those that are 0 may be left out
    factor    that a prediction is multiplied by for its bound
    tasks     by family, how many it was learnt on; empty in files of before they said so, which promise nothing
    """

    about: str
    chunks: Count
    families: Annotated[tuple[Name, ...], Limit(1, 100)]
    ranges: Mapping[str, tuple[Positive, Positive]]
    weights: Mapping[str, Positive]
    factor: Annotated[float, Limit(1)]
    tasks: Mapping[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tasks and set(self.tasks) != set(self.families):
            raise ValueError(f"its tasks are of the families {', '.join(self.families)}, each with their number")
        if set(self.ranges) != set(POLICY) or set(self.weights) - set(NAMES):
            raise ValueError(f"its ranges are of {', '.join(POLICY)}, and its weights of {', '.join(NAMES)}")

    @cached_property
    def vector(self) -> NDArray[np.float64]:
        """The weight of each of NAMES."""
        return np.array([self.weights.get(name, 0.0) for name in NAMES])

    @property
    def formula(self) -> str:
        """The prediction in words."""
        return " + ".join(f"{weight:.3f} x {name}" for name, weight in self.weights.items() if weight >= 5e-4)

    def loss(self, features: ActionFeatures) -> float:
        """The best guess."""
        return min(1.0, float(terms_of(features) @ self.vector))

    def bound(self, loss: float) -> float:
        """What a method of a policy like those in the data loses at most, given its best guess; 1 promises nothing."""
        bound = self.factor * (loss + FLOOR)
        return bound if bound <= MOST else 1.0

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

    @property
    def promises(self) -> tuple[str, ...]:
        """Families that bounds are promised of."""
        return tuple(family for family in self.families if self.tasks.get(family, 0) >= TASKS)

    @property
    def judged(self) -> str:
        """Of which families a bound is promised and why, as a sentence."""
        which = f"only of family {', '.join(self.promises)}" if self.promises else "of no family"
        return f"A bound is promised {which}: it was judged on tasks left out, for which a family needs {TASKS} in the data."

    def _beside(self, features: ActionFeatures, actions: int) -> dict[str, tuple[float, float, float]]:
        """What the policy is like, each with the least and the most of those in the data."""
        return {word: (value(features, actions), *self.ranges[word]) for word, value in POLICY.items()}

    def _unlike(self, features: ActionFeatures, family: str, actions: int, chunks: int) -> str:
        """Why nothing can be promised for the policy, or nothing."""
        if family not in self.families:
            return f"no policy of family {family} is in the data, only {', '.join(self.families)}"
        if not self.tasks:
            return "the model does not say on how many tasks each family was learnt; make it with 'blockcache paper losses'"
        if family not in self.promises:
            return f"family {family} is in the data on a single task, so no bound of it could be judged"
        if actions < LEAST_ACTIONS:
            return f"a chunk of {actions} has no roughness"
        for word, (value, low, high) in self._beside(features, actions).items():
            room = 1 if word == _ACTIONS else ALIKE
            if not low / room <= value <= high * room:
                return f"{word}: {value:.3g}, of policies in the data {low:.3g} to {high:.3g}"
        if chunks < self.chunks / FEWER:
            return f"it was measured on {chunks} chunks, methods in the data on {self.chunks}; give it more"
        return ""


LossModel.FORMAT = Format(
    "blockcache.loss-model",
    "loss model",
    keys_of(LossModel),
    optional=("tasks",),
    again="run 'blockcache paper losses' again",
)


@cache
def shipped_model() -> LossModel:
    """The model that ships with the package."""
    return LossModel.load(str(files("blockcache") / "assets" / "loss-model.json"))


def predict_loss(features: ActionFeatures, family: str, actions: int, chunks: int | None = None) -> Prediction:
    """What a method is likely to lose, by the model that ships with the package; see `LossModel.predict`.

    Args:
        features: Of the method on its policy.
        family: Of the policy.
        actions: In one executed chunk.
        chunks: How many the features were measured on; None is as many as in the data.
    """
    return shipped_model().predict(features, family, actions, chunks)


def terms_of(features: ActionFeatures, terms: Terms = TERMS) -> NDArray[np.float64]:
    """The value of each of NAMES, or of other terms and their roots.

    Args:
        features: Of a method on its policy.
        terms: By name, what gives a term's value.
    """
    values = np.array([max(0.0, term(features)) for term in terms.values()])
    return np.concatenate((values, np.sqrt(values)))
