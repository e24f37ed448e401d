"""What suite frontier has besides its rollouts: how far each method's actions are from the policy's own.

No simulator; at observations that nothing was calibrated, fitted or compared on before. Knows nothing of pages.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2

from blockcache.compare import dealing
from blockcache.compare.candidates import running
from blockcache.errors import ObservationError
from blockcache.files import PathLike
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.distance import Cloud, distances
from blockcache.measure.features import flattened
from blockcache.observations import batch_size, hash_observations
from blockcache.progress import progress_bar
from blockcache.results.rollouts import BASELINE
from blockcache_lab.studies.distances import FrontierDistances, MethodDistances, Modes
from blockcache_lab.studies.suite_runs import SuiteSetting, as_run
from blockcache_lab.studies.suites import FRONTIER

LEAST = 8
"""Observations that distances are measured at."""
APART = 4.0
"""A fork: the parts' means lie this many times a part's own width (root mean square, along the line between them) apart."""
LEAST_SHARE = 0.1
"""Of the samples in the smaller part; fewer are outliers."""


def measure_distances(
    setting: SuiteSetting, directory: PathLike, samples: int = 64, seed: int = 0
) -> FrontierDistances:
    """Draw every method's actions and the policy's own.

    Args:
        setting: That of the suite; its store has what was calibrated and fitted.
        directory: With the suite's file, if it was run: another schedule under the same name is refused.
        samples: Chunks for each observation.
        seed: Of the noise.
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


def modes(found: Cloud, reference: Cloud) -> Modes | None:
    """How often a method takes the reference's smaller mode; None where the reference has one mode everywhere.

    A sharper sampler may drop a mode that the policy takes now and then, which a distance over all observations would not
    tell. So the reference's samples at each observation are parted in two, and where the two parts lie clearly apart, the
    method's samples are counted by the nearer part.

    Args:
        found: The method's samples at each observation.
        reference: The policy's own.
    """
    shares = []
    for ours, theirs in zip(found, reference, strict=True):
        centres = fork(theirs)
        if centres is not None:
            shares.append((_share(ours, centres), _share(theirs, centres)))
    if not shares:
        return None
    by_found, by_reference = np.array(shares).T
    return Modes(
        forks=len(shares),
        reference=float(by_reference.mean()),
        found=float(by_found.mean()),
        apart=float(np.abs(by_found - by_reference).mean()),
        dropped=int((by_found == 0).sum()),
    )


def fork(samples: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The means (2, features) of two modes, the smaller one first; None where there is one mode only."""
    if not np.ptp(samples, axis=0).any():
        return None
    centres, side = kmeans2(samples, 2, minit="++", seed=0)
    sizes = np.bincount(side, minlength=2)
    if sizes.min() < LEAST_SHARE * len(samples):
        return None
    line = centres[1] - centres[0]
    along = (samples - centres[side]) @ (line / np.linalg.norm(line))
    if np.linalg.norm(line) < APART * np.sqrt((along**2).mean()):
        return None
    return np.asarray(centres[np.argsort(sizes, kind="stable")], dtype=np.float64)


def _share(samples: NDArray[np.float64], centres: NDArray[np.float64]) -> float:
    nearer = np.linalg.norm(samples[:, None] - centres, axis=-1).argmin(axis=1)
    return float((nearer == 0).mean())
