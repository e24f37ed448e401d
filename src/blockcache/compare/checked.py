"""What a check found: how a method's actions differ from the full policy's, and what that is likely to cost in closed loop.

A frozen value with a JSON file format. The verdict is a prediction: only rollouts show what a method costs (`eval`).
Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from blockcache.files import Count, Fields, Format, PathLike
from blockcache.fingerprint import Fingerprint
from blockcache.measure.action_error import ActionError
from blockcache.measure.distance import Distances

Verdict: TypeAlias = Literal["looks lossless", "will likely cost score", "do not use"]
VERDICTS: tuple[Verdict, ...] = ("looks lossless", "will likely cost score", "do not use")
# Of methods on Push-T whose losses are known from 250 paired rollouts (docs/check.md has the table): all that lost 0.02 or
# less lie below the first of each pair, all that lost 0.07 or more above the second.
PUSHT_FEATURES = 16
SHIFTS = (0.03, 0.06)
ENERGIES = (0.015, 0.04)


@dataclass(frozen=True)
class Roughness:
    """Mean jerk inside a chunk and mean jump from a chunk to the next one, in normalised units; None where not known."""

    jerk: float | None
    seam: float | None


FORMAT = Format(
    "blockcache.check",
    "check",
    {
        "policy": Fields({"source": str, "fingerprint": dict}),
        "method": dict,
        "setting": Fields({"features": Count}, others=True),
        "error": ActionError,
        "noise_floor": ActionError,
        "distances": Distances,
        "floor": Distances,
        "roughness": Fields({"method": Roughness, "full": Roughness}),
    },
    again="run 'blockcache check' again",
)


@dataclass(frozen=True)
class Check:
    """One method against the full policy, open loop.

    policy       where it came from, and its fingerprint
    method       name, engine, sampler, what is reused when, FLOPs, and those of the full policy
    setting      observations, samples, seed and so on: what else the figures depend on
    error        with the full policy's own noise, where the sampler is the same
    noise_floor  the same between two runs of the full policy with different noise
    distances    of the method's cloud of actions from the full policy's
    floor        of the full policy's cloud from another of its own
    """

    policy: Mapping[str, Any]
    method: Mapping[str, Any]
    setting: Mapping[str, Any]
    error: ActionError
    noise_floor: ActionError
    distances: Distances
    floor: Distances
    roughness: Roughness
    full_roughness: Roughness

    @property
    def shift_limits(self) -> tuple[float, float]:
        """Push-T's, for as many values as a chunk has here: a shift of each value by the same amount counts the same."""
        grown = math.sqrt(self.setting["features"] / PUSHT_FEATURES)
        return SHIFTS[0] * grown, SHIFTS[1] * grown

    @property
    def verdict(self) -> Verdict:
        """By the worse of the centre shift and of the energy distance that a mere change of the spread does not explain."""
        shift = _grade(self.distances.centre_shift.mean, self.shift_limits)
        return VERDICTS[max(shift, _grade(self.energy_beyond_spread, ENERGIES))]

    @property
    def energy_beyond_spread(self) -> float:
        """The energy distance less that of two normal clouds with one centre and these spreads.

        A smaller spread costs nothing in closed loop (DDPM-10 has three quarters of the full one), and this takes it off.
        """
        spread = self.distances.spread.mean
        return self.distances.energy.mean - (math.sqrt(2 * (1 + spread**2)) - 1 - spread)

    @property
    def clear(self) -> bool:
        """Whether the whole interval of the centre shift says the same."""
        shift = self.distances.centre_shift
        return len({_grade(value, self.shift_limits) for value in (shift.low, shift.mean, shift.high)}) == 1

    def save(self, path: PathLike) -> None:
        value = asdict(self)
        value["roughness"] = {"method": value["roughness"], "full": value.pop("full_roughness")}
        FORMAT.save(path, value)

    @classmethod
    def load(cls, path: PathLike) -> Check:
        content = FORMAT.load(path)
        with FORMAT.reading(path):
            Fingerprint.from_dict(content["policy"]["fingerprint"])
        rough = content.pop("roughness")
        return cls(**content, roughness=rough["method"], full_roughness=rough["full"])


def _grade(value: float, limits: tuple[float, float]) -> int:
    return sum(value > limit for limit in limits)
