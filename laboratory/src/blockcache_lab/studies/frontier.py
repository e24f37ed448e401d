"""What suite frontier has besides its rollouts: how far each method's actions are from the policy's own.

No simulator; at observations that nothing was calibrated, fitted or compared on before. Knows nothing of pages.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from blockcache.compare import dealing
from blockcache.compare.candidates import running
from blockcache.errors import ObservationError
from blockcache.files import PathLike
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.distance import Cloud, distances
from blockcache.measure.features import flattened
from blockcache.observations import batch_size, hash_observations
from blockcache.progress import progress_bar
from blockcache.results.distances import FrontierDistances, MethodDistances
from blockcache.results.rollouts import BASELINE
from blockcache_lab.studies.modes import modes
from blockcache_lab.studies.suite_runs import SuiteSetting, as_run
from blockcache_lab.studies.suites import FRONTIER

LEAST = 8
"""Observations that distances are measured at."""


def measure_distances(
    setting: SuiteSetting, directory: PathLike, samples: int = 64, seed: int = 0
) -> FrontierDistances:
    """Draw every method's actions and the policy's own.

    setting    that of the suite; its store has what was calibrated and fitted
    directory  with the suite's file, if it was run: another schedule under the same name is refused
    samples    chunks for each observation
    seed       of the noise
    """
    port, used = setting.port, setting.counts.generations + dealing.COMPARED + dealing.FITTED
    count = batch_size(setting.observations) - used
    if count < LEAST:
        raise ObservationError(
            f"distances need at least {LEAST} observations besides {used} to calibrate, compare and fit on, got "
            f"{max(0, count)}; record more with 'blockcache policy observe'"
        )
    seen = dealing.deal_for_evaluation(setting.observations, setting.counts.generations)[dealing.DISTANCES]
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
