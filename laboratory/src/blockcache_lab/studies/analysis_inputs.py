"""What the analyses of one policy start from: observations by purpose, recording and schedules, each made when needed.

Knows nothing of sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache._version import __version__
from blockcache.compare.candidates import Calibrations
from blockcache.engines.accelerate import check_fit
from blockcache.errors import RecordingError
from blockcache.fingerprint import fingerprint_differences
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, hash_observations, pick, rows
from blockcache.results.rollouts import GENERATIONS
from blockcache.schedule import Schedule
from blockcache.solvers import PAPER_METHODS, Recording, solve
from blockcache.solvers.solve import UPDATES
from blockcache_lab.analysis.caching import ffns_of
from blockcache_lab.analysis.residuals import in_parts
from blockcache_lab.analysis.section import AnalysisError

COMPARED, EPISODES = 16, 50
"""Observations that caching errors are a mean over, beside those that were calibrated on; and episodes that are compared."""


@dataclass(frozen=True)
class Sizes:
    """How many observations go into what.

    Args:
        generations: To calibrate on, from the first observation on.
        compared: To find errors at, after those.
        episodes: To compare with one another, spread over all observations.
    """

    generations: int = GENERATIONS
    compared: int = COMPARED
    episodes: int = EPISODES

    def __post_init__(self) -> None:
        if min(self.generations, self.compared, self.episodes) < 2:
            raise AnalysisError(
                f"an analysis needs 2 generations, compared observations and episodes at least, got {self.generations}, "
                f"{self.compared} and {self.episodes}"
            )


@dataclass(frozen=True, eq=False)
class AnalysisInputs:
    """What was given, and what is made of it when a section first needs it.

    Args:
        port: The policy.
        observations: A batch.
        state: A directory that keeps what is finished: the same analyses go on from there.
        given_recording: What `calibrate` gave of this very policy, best with action costs; made here unless given.
        given_schedule: One of this policy, analysed beside the paper's methods.
        weaker: Name and policy object of a weaker policy for the same task, to see whether caching hurts it more.
        moments: (N, 2) the episode of each observation and the place in it, where that is known.
        sizes: How many observations go into what.
        seed: Of all noise.
        progress: Whether to show progress bars.
    """

    port: Port
    observations: Any
    state: Path
    given_recording: Recording | None = None
    given_schedule: Schedule | None = None
    weaker: tuple[str, Any] | None = None
    moments: NDArray[np.int64] | None = None
    sizes: Sizes = Sizes()
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        recording, own = self.given_recording, self.port.fingerprint
        if recording is not None and (odd := fingerprint_differences(recording.fingerprint, own)):
            raise AnalysisError(
                f"this recording is not of the policy, which has {'; '.join(odd)}; calibrate again with 'blockcache "
                "calibrate'"
            )
        if self.given_schedule is not None:
            check_fit(self.given_schedule.fingerprint, self.port)

    def check(self, names: Sequence[str]) -> None:
        """Refuse fewer observations than the sections of these names need."""
        total, sizes = batch_size(self.observations), self.sizes
        calibrated = sizes.generations if self.given_recording is None or "stability" in names else 0
        needed = {
            f"{calibrated} to calibrate on and {sizes.compared} others": calibrated + sizes.compared,
            f"{sizes.episodes} to compare with one another": sizes.episodes if "homogeneity" in names else 0,
        }
        for what, count in needed.items():
            if total < count:
                raise AnalysisError(
                    f"{total} observations are too few: {what} are needed; record more with 'blockcache policy observe', or "
                    "ask for fewer generations or episodes"
                )

    @property
    def origin(self) -> dict[str, Any]:
        """All that a section depends on, in JSON types."""
        recording, schedule = self.given_recording, self.given_schedule
        return {
            "made_by": __version__,
            "policy": self.port.fingerprint.to_dict(),
            "observations": hash_observations(self.observations),
            "moments": None if self.moments is None else hash_observations(self.moments),
            "sizes": list(astuple(self.sizes)),
            "seed": self.seed,
            "recording": None if recording is None else hash_observations(_arrays(recording)),
            "schedule": None if schedule is None else schedule.describe(),
            "weaker": None if self.weaker is None else port_of(self.weaker[1]).fingerprint.to_dict(),
        }

    @cached_property
    def recording(self) -> Recording:
        """With action costs wherever the policy can be differentiated."""
        if self.given_recording is not None:
            return self.given_recording
        try:
            return self.calibrations(self.port).recording(action_costs=True)
        except RecordingError:
            return self.calibrations(self.port).recording()

    @property
    def updates(self) -> int:
        """Update steps of each block (S): as many as in the paper, or half the steps if there are few."""
        steps = len(self.port.timesteps)
        return min(steps, UPDATES, max(2, steps // 2))

    @cached_property
    def schedules(self) -> dict[str, Schedule]:
        """By name: those of the paper's methods, and `given`."""
        made = {method: solve(self.recording, self.updates, method=method) for method in PAPER_METHODS}
        return made if self.given_schedule is None else {**made, "given": self.given_schedule}

    @property
    def main(self) -> str:
        return "bac" if self.given_schedule is None else "given"

    @cached_property
    def calibrated(self) -> Any:
        return rows(self.observations, 0, self.sizes.generations)

    @cached_property
    def compared(self) -> list[Any]:
        """Observations that nothing was calibrated on, in batches."""
        total = batch_size(self.observations)
        first = min(self.sizes.generations, total - self.sizes.compared)
        return in_parts(self.port, rows(self.observations, first, first + self.sizes.compared))

    @cached_property
    def spread(self) -> tuple[list[Any], bool]:
        """One observation of each of several episodes, or evenly spread ones if episodes are not known; and which it is."""
        places, known = spread_places(batch_size(self.observations), self.moments, self.sizes.episodes)
        return in_parts(self.port, pick(self.observations, places)), known

    def bar(self, what: str) -> str | None:
        """The words before a progress bar; None where none is shown."""
        return what if self.progress else None

    def ffn(self, place: int) -> str:
        """The name of the FFN at that place in execution order, or of the last one."""
        names = ffns_of(self.port)
        if not names:
            raise AnalysisError(f"The family {self.port.adapter.family} has no block of kind FFN.")
        return names[min(place, len(names) - 1)]

    def calibrations(self, port: Port) -> Calibrations:
        return Calibrations(port, self.calibrated, seed=self.seed, keep=self.state, progress=self.progress)


def _arrays(recording: Recording) -> dict[str, Any]:
    costs = {} if recording.action_costs is None else {"action_costs": recording.action_costs}
    return {**recording.matrices, "scores": recording.scores, **costs}


def spread_places(total: int, moments: NDArray[np.int64] | None, count: int) -> tuple[list[int], bool]:
    """Places of `count` observations, each of another episode where `moments` say so; and whether they do.

    Of an episode the observation is taken that is nearest to its middle: they are compared at the same stage.
    """
    even = np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()
    if moments is None:
        return even, False
    places = {}
    for episode in np.unique(moments[:, 0]):
        own = np.flatnonzero(moments[:, 0] == episode)
        order = own[np.argsort(moments[own, 1], kind="stable")]
        places[int(episode)] = int(order[len(order) // 2])
    return (sorted(places.values())[:count], True) if len(places) >= count else (even, False)
