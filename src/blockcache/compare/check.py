"""Judge one method or schedule without a simulator: draw its actions and the full policy's at recorded observations.

Knows nothing of tasks, and of policies no more than their port.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.compare.candidates import Calibrations, Candidate, running
from blockcache.compare.checked import Check, Roughness
from blockcache.compare.clouds import draw_chunks, flattened
from blockcache.compare.methods import parse_method
from blockcache.compare.results import GENERATIONS
from blockcache.errors import ObservationError
from blockcache.measure.action_error import Act, ActionError, action_error
from blockcache.measure.distance import distances
from blockcache.measure.statistics import mean_jerk
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, hash_observations, pick, rows, split
from blockcache.schedule import Strategy

OBSERVATIONS, SAMPLES = 24, 32
PAIRED, SEAMS, SEAM_SAMPLES = (
    4,
    16,
    2,
)  # chunks per observation for the action error; pairs of chunks, and samples of each


def check(
    policy: Any,
    schedule: Strategy | str,
    observations: Any,
    *,
    moments: NDArray[np.int64] | None = None,
    count: int = OBSERVATIONS,
    samples: int = SAMPLES,
    generations: int = GENERATIONS,
    seed: int = 0,
    engine: str = "auto",
    source: str = "",
    name: str = "",
    progress: bool = True,
) -> Check:
    """How far a method's actions are from the full policy's, and what that is likely to cost. No simulator is needed.

    policy        the policy object, ours or foreign (or its port)
    schedule      a schedule, or a method by its name, such as "bac:S=10,n=5" or "ddpm-10"
    observations  a batch from closed-loop states over whole episodes, such as `blockcache policy observe` records
    moments       (N, 2) episode and place in it, where known: chunks that follow one another show the jump between them
    count         observations to compare at
    samples       chunks for each observation; the full policy's are drawn as two halves, which show its own floor
    generations   the first observations, which methods are calibrated on: they are never compared at
    seed          of the noise and of the choice of observations
    engine        for the method and the full policy
    source        where the policy came from, for the record
    name          what the schedule is called; a method has a name
    """
    port, total = port_of(policy), batch_size(observations)
    if samples < 4 or samples % 2 or count < 2:
        raise ObservationError(
            f"a check needs at least 2 observations and an even number of samples from 4 on, got {count} and {samples}"
        )
    calibration = rows(observations, 0, generations)
    places = split(observations, {"distances": count}, seed, taken=calibration)["distances"]
    seams = _seams(moments, generations, total, seed)
    if isinstance(schedule, str):
        method = parse_method(schedule)
        name = name or method.name
        candidate = Calibrations(port, calibration, progress=progress).candidate(method, engine)
    else:
        candidate = Candidate(schedule, engine)
    seen, scale, label = pick(observations, places), port.action_scale, "full precision" if progress else None
    one, other, own, before, after = range(5 * seed, 5 * seed + 5)  # seeds of noise; each is independent of the others

    def jumps(act: Act) -> float | None:
        if not len(seams):
            return None
        first, second = (
            draw_chunks(act, pick(observations, side), SEAM_SAMPLES, scale, noise)
            for side, noise in ((seams[:, 0], before), (seams[:, 1], after))
        )
        return float(np.linalg.norm(second[:, :, 0] - first[:, :, -1], axis=-1).mean())

    # both are set going first: a schedule that does not fit is refused before anything is drawn
    with running(port, Candidate(engine=engine)) as full, running(port, candidate) as fast:
        halves = [draw_chunks(full.act, seen, samples // 2, scale, noise, progress=label) for noise in (one, other)]
        full_roughness = Roughness(mean_jerk(np.stack(halves)), jumps(full.act))
        found = draw_chunks(
            fast.act, seen, samples, scale, own, progress=(name or "the schedule") if progress else None
        )
        paired = draw_chunks(fast.act, seen, min(PAIRED, samples // 2), scale, one)
        roughness = Roughness(mean_jerk(found), jumps(fast.act))
        stats, used = fast.stats(), fast.engine
    reference = np.concatenate(halves, axis=1)
    return Check(
        policy={"source": source, "fingerprint": port.fingerprint.to_dict()},
        method={
            "name": name,
            **candidate.describe(port),
            "engine": used,
            "shares_all_noise": candidate.on(port).sampler_settings == port.sampler_settings,
            "flops": candidate.flops(port, stats.reused_share if stats else 0.0),
            "full_flops": Candidate().flops(port, 0.0),
        },
        setting={
            "observations": count,
            "samples": samples,
            "features": int(np.prod(reference.shape[2:])),
            "seams": len(seams),
            "calibration": generations,
            "seed": seed,
            "observed": hash_observations(observations),
        },
        error=_error(paired, halves[0][:, : paired.shape[1]]),
        noise_floor=_error(*halves),
        distances=distances(flattened(found), flattened(reference)),
        floor=distances(*map(flattened, halves)),
        roughness=roughness,
        full_roughness=full_roughness,
    )


def _error(found: NDArray[np.float64], expected: NDArray[np.float64]) -> ActionError:
    """Of chunks (observations, samples, n_action, A) that are in normalised units already."""
    one, other = (chunks.reshape(-1, *chunks.shape[2:]) for chunks in (found, expected))
    return action_error(one, other, np.ones(one.shape[-1]))


def _seams(moments: Any, first: int, total: int, seed: int) -> NDArray[np.intp]:
    """(at most SEAMS, 2) places of two observations of which the second's chunk follows the first's."""
    if moments is None:
        return np.empty((0, 2), dtype=np.intp)
    known = np.asarray(moments)
    if known.shape != (total, 2) or known.dtype.kind not in "iu":
        raise ObservationError(
            f"moments need whole numbers (episode, place in it) for each of {total} observations, got {known.dtype} of "
            f"shape {known.shape}; leave them out where they are not known"
        )
    place = {(int(episode), int(chunk)): index for index, (episode, chunk) in enumerate(known) if index >= first}
    pairs = [
        (index, place[episode, chunk + 1]) for (episode, chunk), index in place.items() if (episode, chunk + 1) in place
    ]
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:SEAMS]
    return np.array([pairs[index] for index in chosen], dtype=np.intp).reshape(-1, 2)
