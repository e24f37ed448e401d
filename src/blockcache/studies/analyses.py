"""All analyses of one policy, one after the other; each finished one is kept, so what was killed goes on where it was.

Knows nothing of plots, and of policies no more than their port.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache._version import __version__
from blockcache.analysis.caching import caching_errors
from blockcache.analysis.correlation import error_correlation, ffns_of
from blockcache.analysis.feature_maps import feature_maps
from blockcache.analysis.feed_forward import ffn_response, sublayer_errors, weight_norms
from blockcache.analysis.file import Analysis, check_names
from blockcache.analysis.homogeneity import homogeneity, sample_matrices, schedule_stability
from blockcache.analysis.recorded import action_costs, similarity
from blockcache.analysis.residuals import in_parts
from blockcache.analysis.section import AnalysisError, Section
from blockcache.analysis.sections import SECTIONS, WeakerPolicy
from blockcache.analysis.weaker import weaker_policy
from blockcache.compare.candidates import Calibrations, digest
from blockcache.compare.results import GENERATIONS
from blockcache.engines.accelerate import check_fit
from blockcache.errors import RecordingError
from blockcache.files import PathLike, exists, make_directory
from blockcache.measure import machine
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, hash_observations, pick, rows
from blockcache.progress import progress_bar
from blockcache.schedule import Schedule
from blockcache.solvers import PAPER_METHODS, Recording, solve
from blockcache.solvers.solve import UPDATES

COMPARED, EPISODES = 16, 50
"""Observations that caching errors are a mean over, beside those that were calibrated on; and episodes that are compared."""


@dataclass(frozen=True)
class Sizes:
    """How many observations go into what.

    generations  to calibrate on, from the first observation on
    compared     to find errors at, behind those
    episodes     to compare with one another, spread over all observations
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

    def check(self, total: int, recorded: bool, only: Sequence[str]) -> None:
        """Refuse fewer observations than the sections need."""
        calibrated = 0 if recorded and "stability" not in only else self.generations
        needed = {
            f"{calibrated} to calibrate on and {self.compared} others": calibrated + self.compared,
            f"{self.episodes} to compare with one another": self.episodes if "homogeneity" in only else 0,
        }
        for what, count in needed.items():
            if total < count:
                raise AnalysisError(
                    f"{total} observations are too few: {what} are needed; record more with 'blockcache policy observe', or "
                    "ask for fewer generations or episodes"
                )


def analyse(
    policy: Any,
    observations: Any,
    *,
    state: PathLike,
    recording: Recording | None = None,
    schedule: Schedule | None = None,
    weaker: tuple[str, Any] | None = None,
    only: Sequence[str] = (),
    moments: NDArray[np.int64] | None = None,
    sizes: Sizes | None = None,
    seed: int = 0,
    source: str = "",
    command: str = "",
    progress: bool = True,
) -> Analysis:
    """Every analysis of the paper that the policy allows, or those that are named.

    policy        the policy object, ours or foreign (or its port)
    observations  a batch
    state         a directory that keeps what is finished: the same call goes on from there
    recording     what `calibrate` gave of this very policy, best with action costs; made here unless given
    schedule      one of this policy, looked at beside the paper's methods
    weaker        name and policy object of a weaker policy for the same task, to see whether caching hurts it more
    only          names of sections; all unless given
    moments       (N, 2) the episode of each observation and the place in it, where that is known
    sizes         how many observations go into what
    seed          of all noise
    source        where the policy came from, for the record
    command       what somebody typed, for the record
    """
    check_names(only)
    port, sizes = port_of(policy), sizes or Sizes()
    names = [name for name in SECTIONS if name in only or (not only and (name != WeakerPolicy.name or weaker))]
    if WeakerPolicy.name in names and weaker is None:
        raise AnalysisError(
            "the section weaker compares with a weaker policy, and none was given; name it with --weaker"
        )
    if recording is not None and (odd := recording.fingerprint.differences(port.fingerprint)):
        raise AnalysisError(
            f"this recording is not of the policy, which has {'; '.join(odd)}; calibrate again with 'blockcache calibrate'"
        )
    if schedule is not None:
        check_fit(schedule.fingerprint, port)
    sizes.check(batch_size(observations), recording is not None, names)
    given = _Given(port, observations, recording, schedule, weaker, moments, sizes, seed, Path(state), progress)
    setting = {
        "seed": seed,
        "generations": sizes.generations if recording is None else recording.generations,
        "observations": {"count": batch_size(observations), "hash": hash_observations(observations)},
        "command": command,
        "machine": machine.describe(),
    }
    about: dict[str, Any] = {
        "source": source,
        "fingerprint": port.fingerprint,
        "blocks": port.adapter.blocks,
        "setting": setting,
    }
    found = [
        _kept(given, about, name) for name in progress_bar(names, "analyses", unit="section", disable=not progress)
    ]
    return Analysis(
        **about,
        schedules={key: value for item in found for key, value in item.schedules.items()},
        sections={key: value for item in found for key, value in item.sections.items()},
        absent={key: value for item in found for key, value in item.absent.items()},
        seconds={key: value for item in found for key, value in item.seconds.items()},
    )


def _kept(given: _Given, about: Mapping[str, Any], name: str) -> Analysis:
    """An analysis of one section, from the state if it is there."""
    file = given.state / f"{name}-{digest({'section': name, **given.origin})[:16]}.safetensors"
    if exists(file):
        return Analysis.load(file)
    started, sections, absent = time.perf_counter(), dict[str, Section](), dict[str, str]()
    try:
        sections[name] = _MAKERS[name](given)
    except AnalysisError as error:
        absent[name] = str(error)
    origins = {key: {"origin": dict(value.origin)} for key, value in given.schedules.items()}
    seconds = {name: round(time.perf_counter() - started, 2)}
    made = Analysis(**about, schedules=origins, sections=sections, absent=absent, seconds=seconds)
    make_directory(given.state)
    made.save(file)
    return made


@dataclass(frozen=True, eq=False)
class _Given:
    """What the sections are made from; the rest is made of that when a section first needs it."""

    port: Port
    observations: Any
    given_recording: Recording | None
    given_schedule: Schedule | None
    weaker: tuple[str, Any] | None
    moments: NDArray[np.int64] | None
    sizes: Sizes
    seed: int
    state: Path
    progress: bool

    @property
    def origin(self) -> dict[str, Any]:
        """All that a section depends on, in JSON types."""
        recording, schedule = self.given_recording, self.given_schedule
        return {
            "made_by": __version__,
            "policy": self.port.fingerprint.to_dict(),
            "observations": hash_observations(self.observations),
            "moments": None if self.moments is None else hash_observations(self.moments),
            "sizes": [self.sizes.generations, self.sizes.compared, self.sizes.episodes],
            "seed": self.seed,
            "recording": None if recording is None else hash_observations(_arrays(recording)),
            "schedule": None if schedule is None else schedule.describe(),
            "weaker": None if self.weaker is None else port_of(self.weaker[1]).fingerprint.to_dict(),
        }

    @cached_property
    def recording(self) -> Recording:
        """With action costs wherever the policy can be walked backwards."""
        if self.given_recording is not None:
            return self.given_recording
        try:
            return self._calibrations(self.port).recording(action_costs=True)
        except RecordingError:
            return self._calibrations(self.port).recording()

    @property
    def updates(self) -> int:
        """S: the paper's, or half the steps if there are few."""
        steps = len(self.port.timesteps)
        return min(steps, UPDATES, max(2, steps // 2))

    @cached_property
    def schedules(self) -> dict[str, Schedule]:
        """The paper's methods, and what somebody asked for."""
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

    def said(self, what: str) -> str | None:
        """For a bar, if there are to be any."""
        return what if self.progress else None

    def ffn(self, place: int) -> str:
        """The FFN at that place, or the last one."""
        names = ffns_of(self.port)
        if not names:
            raise AnalysisError(f"The family {self.port.adapter.family} has no block of kind FFN.")
        return names[min(place, len(names) - 1)]

    def weaker_section(self) -> WeakerPolicy:
        assert self.weaker is not None  # checked before anything is made
        name, other = self.weaker[0], port_of(self.weaker[1])
        recording = self._calibrations(other).recording()
        weak = solve(recording, self.updates, method="bac")
        both = [("the policy", self.port, self.schedules["bac"]), (name, other, weak)]
        return weaker_policy(both, self.compared, self.seed, method=f"bac:S={self.updates}")

    def _calibrations(self, port: Port) -> Calibrations:
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


def _sublayers(given: _Given) -> Section:
    block, schedule = given.ffn(2), given.schedules["blockwise"]
    later = schedule.updates[block][1:]
    at = tuple(sorted({later[0], later[len(later) // 2]})) if later else (0,)
    return sublayer_errors(given.port, schedule, block, at, given.compared[0], given.seed, named="blockwise")


def _features(given: _Given) -> Section:
    names = ffns_of(given.port) or [block.name for block in given.port.adapter.blocks]
    blocks = list(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
    return feature_maps(
        given.port, given.schedules[given.main], blocks, given.compared[0], given.seed, named=given.main
    )


def _homogeneity(given: _Given) -> Section:
    batches, known = given.spread
    return homogeneity(given.port, batches, given.seed, separate=known, progress=given.said("episodes"))


def _stability(given: _Given) -> Section:
    batches = in_parts(given.port, given.calibrated)
    matrices = sample_matrices(given.port, batches, given.seed, given.said("each generation"))
    return schedule_stability(matrices, given.updates, given.seed)


_MAKERS: dict[str, Callable[[_Given], Section]] = {
    "similarity": lambda given: similarity(given.recording),
    "caching": lambda given: caching_errors(
        given.port, given.schedules, given.compared, given.seed, given.said("caching errors")
    ),
    "sublayers": _sublayers,
    "correlation": lambda given: error_correlation(
        given.port, given.compared, given.seed, progress=given.said("upstream and downstream")
    ),
    "response": lambda given: ffn_response(
        given.port, given.ffn(2), len(given.port.timesteps) // 2, given.compared[0], given.seed
    ),
    "weights": lambda given: weight_norms(given.port),
    "features": _features,
    "homogeneity": _homogeneity,
    "stability": _stability,
    "action-costs": lambda given: action_costs(given.recording),
    "weaker": _Given.weaker_section,
}
