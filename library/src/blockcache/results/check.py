"""What a check found: how a method's actions differ from the full policy's, and what that is likely to cost in closed loop.

A frozen value with a JSON file format. The verdict is a prediction: only rollouts show what a method costs (`eval`).
Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from blockcache.files import Count, Fields, Format, keys_of
from blockcache.measure.action_error import ActionError
from blockcache.measure.distance import Distances
from blockcache.measure.features import ActionFeatures
from blockcache.results.losses import Prediction, predict_loss
from blockcache.results.rollouts import OfPolicy, PolicyOrigin

Verdict: TypeAlias = Literal["looks lossless", "will likely cost score", "do not use", "cannot be told"]
VERDICTS: tuple[Verdict, ...] = ("looks lossless", "will likely cost score", "do not use")
UNKNOWN: Verdict = "cannot be told"
# From methods on Push-T whose losses are known from 250 paired rollouts each (docs/tune-and-check.md): all that lost 0.02 or
# less lie below the first of each pair, all that lost 0.07 or more above the second in at least one of the two.
PUSHT_FEATURES = 16
SHIFTS = (0.04, 0.06)
ENERGIES = (0.05, 0.09)  # beyond spread
LOSSES = (0.02, 0.07)
BOUND = 0.06
"""What looks lossless loses no more than this with 90 % certainty."""
SAME = 1e-3
"""Of the error between two runs with different noise: below it a method's actions are the policy's own."""


@dataclass(frozen=True)
class Roughness:
    """Mean jerk inside a chunk and mean jump from a chunk to the next one, in normalised units; None where not known."""

    jerk: float | None
    seam: float | None


_METHOD = {"name": str, "engine": str, "shares_all_noise": bool, "flops": Count, "full_flops": Count}
_SETTING = dict.fromkeys(("observations", "samples", "features", "seams"), Count)


@dataclass(frozen=True)
class Check(OfPolicy):
    """One method against the full policy, open loop.

    policy       where it came from, and its fingerprint
    method       name, engine, sampler, what is reused when, FLOPs, and those of the full policy
    setting      observations, samples, seed and so on: what else the figures depend on
    error        with the full policy's own noise, where the sampler is the same
    noise_floor  the same between two runs of the full policy with different noise
    distances    of the method's cloud of actions from the full policy's
    floor        of the full policy's cloud from another of its own
    features     what the loss is predicted from; None in files of before there were any
    """

    policy: PolicyOrigin
    method: Annotated[Mapping[str, Any], Fields(_METHOD, others=True)]
    setting: Annotated[Mapping[str, Any], Fields(_SETTING, {"actions": Count}, others=True)]
    error: ActionError
    noise_floor: ActionError
    distances: Distances
    floor: Distances
    roughness: Roughness
    full_roughness: Roughness
    features: ActionFeatures | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features is not None and "actions" not in self.setting:
            raise ValueError("it has features but not the number of actions that they are of")

    @property
    def name(self) -> str:
        """What is judged, for people."""
        return self.method["name"] or "the schedule"

    @property
    def shift_limits(self) -> tuple[float, float]:
        return shift_limits(self.setting["features"])

    @property
    def same(self) -> bool:
        """Whether the method's actions are the policy's own, noise for noise."""
        return bool(self.method["shares_all_noise"]) and self.error.mean <= SAME * self.noise_floor.mean

    @cached_property
    def prediction(self) -> Prediction:
        """What the method is likely to lose; by its distances alone where the file has no features."""
        if self.same:
            return Prediction(0.0, 0.0)
        if self.features is None:
            return Prediction(
                predicted_loss(self.distances, self.setting["features"]), None, "the file is of an earlier version"
            )
        chunks = self.setting["observations"] * self.setting["samples"]
        return predict_loss(self.features, self.fingerprint.family or "", self.setting["actions"], chunks)

    @property
    def loss(self) -> float:
        return self.prediction.loss

    @property
    def verdict(self) -> Verdict:
        """By the worst of centre shift, energy beyond spread and the predicted loss with its bound. What may yet be of no
        use never looks lossless, and neither does what nothing can be promised of."""
        grade = max(self._graded("mean"), self._graded("high") - 1)
        return VERDICTS[grade] if self.features is None or self.same else verdict_of(grade, self.prediction)

    @property
    def clear(self) -> bool:
        """Whether both ends of the intervals say the same."""
        return self._graded("low") == self._graded("high")

    def _graded(self, end: Literal["low", "mean", "high"]) -> int:
        shift, beyond = self.distances.centre_shift, self.distances.beyond_spread
        return grade_of(getattr(shift, end), getattr(beyond, end), self.setting["features"])

    def content(self) -> dict[str, Any]:
        found = super().content()
        rough = {"method": found["roughness"], "full": found.pop("full_roughness")}
        return {**found, "roughness": rough}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Check:
        rough = content.pop("roughness")
        return cls(**content, roughness=rough["method"], full_roughness=rough["full"])


_KEYS = {**keys_of(Check), "roughness": Fields({"method": Roughness, "full": Roughness})}
del _KEYS["full_roughness"]
Check.FORMAT = Format("blockcache.check", "check", _KEYS, again="run 'blockcache check' again", optional=("features",))


def shift_limits(features: int) -> tuple[float, float]:
    """Push-T's, for as many values as a chunk has here: a shift of each value by the same amount counts the same."""
    grown = math.sqrt(features / PUSHT_FEATURES)
    return SHIFTS[0] * grown, SHIFTS[1] * grown


def grade_of(shift: float, beyond: float, features: int) -> int:
    """How many limits the worse of two distances lies above: a place in VERDICTS.

    Args:
        shift: Of the centre.
        beyond: Energy beyond spread.
        features: Values in one executed chunk.
    """
    pairs = ((shift, shift_limits(features)), (beyond, ENERGIES))
    return max(sum(bool(value > limit) for limit in limits) for value, limits in pairs)


def verdict_of(grade: int, found: Prediction) -> Verdict:
    """By the worse of what distances say and of the predicted loss with its bound.

    Args:
        grade: By distances, a place in VERDICTS.
        found: The loss and its bound.
    """
    grade = max(grade, 2 if found.loss > LOSSES[1] else int(found.bound is None or found.bound > BOUND))
    return UNKNOWN if found.bound is None and grade < 2 else VERDICTS[grade]


def predicted_loss(found: Distances, features: int) -> float:
    """What a method is likely to cost, of a score up to 1: along straight lines through the losses that the limits stand
    for, by the worse of centre shift and energy beyond spread. A prediction; its order can be trusted more than its size.

    Args:
        found: How far the method's actions are from the full policy's.
        features: Values in one executed chunk.
    """
    pairs = ((found.centre_shift.mean, shift_limits(features)), (found.beyond_spread.mean, ENERGIES))
    return min(1.0, max(_along(value, *limits) for value, limits in pairs))


def _along(value: float, first: float, second: float) -> float:
    if value <= first:
        return LOSSES[0] * max(value, 0.0) / first
    return LOSSES[0] + (LOSSES[1] - LOSSES[0]) * (value - first) / (second - first)
