"""What suite frontier has besides its rollouts: how far each method's actions are from the policy's own.

No simulator; at observations that nothing was calibrated, fitted or compared on before. Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockcache.compare.candidates import running
from blockcache.compare.clouds import draw_chunks, flattened
from blockcache.compare.evaluation import FITTING, OPEN_LOOP
from blockcache.errors import ObservationError
from blockcache.files import Count, Format, PathLike, dict_of
from blockcache.fingerprint import Fingerprint
from blockcache.measure.distance import Cloud, Distances, distances
from blockcache.observations import batch_size, hash_observations, rows
from blockcache.progress import progress_bar
from blockcache.results.rollouts import BASELINE
from blockcache_lab.studies.modes import Modes, modes
from blockcache_lab.studies.suite_runs import SuiteSetting, as_run
from blockcache_lab.studies.suites import FRONTIER

LEAST = 8
"""Observations that distances are measured at."""


@dataclass(frozen=True)
class MethodDistances:
    """How far a method's cloud of actions is from the policy's own, and whether it takes the same modes at forks."""

    distances: Distances
    modes: Modes | None


FORMAT = Format(
    "blockcache.frontier-distances",
    "distances",
    {
        "policy": Fingerprint,
        "setting": dict,
        "features": Count,
        "floor": Distances,
        "methods": dict_of(MethodDistances),
    },
    again="run 'blockcache paper distances' again",
)


@dataclass(frozen=True)
class FrontierDistances:
    """Distances of all methods of a suite, at the same observations and with the same noise.

    setting   observations, samples and seed
    features  values in an executed chunk
    floor     of one half of the policy's own cloud from the other
    methods   by name; the policy as it is is not among them
    """

    policy: Fingerprint
    setting: Mapping[str, Any]
    features: int
    floor: Distances
    methods: Mapping[str, MethodDistances]

    def save(self, path: PathLike) -> None:
        FORMAT.save(path, {**asdict(self), "policy": self.policy.to_dict()})

    @classmethod
    def load(cls, path: PathLike) -> FrontierDistances:
        return cls(**FORMAT.load(path))


def measure_distances(
    setting: SuiteSetting, directory: PathLike, samples: int = 64, seed: int = 0
) -> FrontierDistances:
    """Draw every method's actions and the policy's own.

    setting    that of the suite; its store has what was calibrated and fitted
    directory  with the suite's file, if it was run: another schedule under the same name is refused
    samples    chunks for each observation
    seed       of the noise
    """
    port, used = setting.port, setting.counts.generations + OPEN_LOOP + FITTING
    count = batch_size(setting.observations) - used
    if count < LEAST:
        raise ObservationError(
            f"distances need at least {LEAST} observations besides {used} to calibrate, compare and fit on, got "
            f"{max(0, count)}; record more with 'blockcache policy observe'"
        )
    seen = rows(setting.observations, used, used + count)
    (suite,) = as_run(setting, directory, [FRONTIER])
    evaluation = setting.evaluation(suite.methods, 1)
    evaluation.check_alike(Path(directory) / f"{FRONTIER}.json")

    def cloud(name: str, draws: int, noise: int, shown: bool) -> Cloud:
        progress = name if shown and setting.progress else None
        with running(port, evaluation.candidates[name]) as fast:
            return flattened(draw_chunks(fast.act, seen, draws, port.action_scale, noise, progress=progress))

    own = cloud(BASELINE, samples, seed, shown=True)
    others = [name for name in evaluation.candidates if name != BASELINE]
    found = {}
    for name in progress_bar(others, "distances", unit="method", disable=not setting.progress):
        drawn = cloud(name, samples, seed, shown=False)
        found[name] = MethodDistances(distances(drawn, own), modes(drawn, own))
    return FrontierDistances(
        policy=evaluation.fingerprint,
        setting={"observations": count, "samples": samples, "seed": seed, "observed": hash_observations(seen)},
        features=own.shape[-1],
        floor=distances(*np.split(own[:, : samples // 2 * 2], 2, axis=1)),
        methods=found,
    )
