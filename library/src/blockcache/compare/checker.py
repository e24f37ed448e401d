"""Judge one method or schedule without a simulator: draw its actions and the full policy's at recorded observations.

Knows nothing of tasks, and of policies no more than their port.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.compare.candidates import Calibrations, Candidate, running
from blockcache.compare.dealing import CALIBRATION, DISTANCES, count_given, deal
from blockcache.compare.methods import Method, parse_method
from blockcache.errors import ObservationError, PolicyError
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.action_error import Act, ActionError, action_error
from blockcache.measure.distance import Cloud, Distances, distances
from blockcache.measure.features import action_features, flattened
from blockcache.measure.statistics import mean_jerk
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.observations import hash_observations, pick
from blockcache.results.check import Check, Roughness
from blockcache.results.losses import Prediction, predict_loss
from blockcache.results.rollouts import GENERATIONS, OBSERVATIONS, SAMPLES
from blockcache.schedule import Strategy

SEAMS, SEAM_SAMPLES = 16, 2  # pairs of chunks that follow each other, and samples of each


def check(
    policy: Any,
    schedule: Strategy | Method | str,
    observations: Any,
    *,
    name: str = "",
    moments: NDArray[np.int64] | None = None,
    count: int = OBSERVATIONS,
    samples: int = SAMPLES,
    generations: int = GENERATIONS,
    seed: int = 0,
    engine: str = "auto",
    source: str = "",
    command: str = "",
    progress: bool = True,
) -> Check:
    """How far a method's actions are from the full policy's, and what that is likely to cost. No simulator is needed.

    Args:
        policy: A policy object of any known family, or its port.
        schedule: A schedule; or a method, which may go by its name, such as "bac:S=10,n=5" or "ddpm-10".
        observations: A batch from closed-loop states over whole episodes, such as `blockcache policy observe` records.
        name: What the schedule is called; a method has a name.
        moments: (N, 2) episode and place in it, where known: chunks that follow one another show the jump between them.
        count: Observations to compare at.
        samples: Chunks for each observation; the full policy's are drawn as two halves, which show its own floor.
        generations: The first observations, which methods are calibrated on: they are never compared at.
        seed: Of the noise and of the choice of observations.
        engine: For the method and the full policy.
        source: Where the policy came from, for the record.
        command: What somebody typed, for the record.
        progress: Whether to show bars.
    """
    if samples < 4 or samples % 2 or count < 2:
        raise ObservationError(
            f"a check needs at least 2 observations and an even number of samples from 4 on, got {count} and {samples}"
        )
    given = count_given(observations, "a check")
    port = port_of(policy)
    dealt = deal(observations, {CALIBRATION: generations}, {DISTANCES: count}, seed)
    wanted = parse_method(schedule) if isinstance(schedule, str) else schedule
    if isinstance(wanted, Method):
        name = name or wanted.name
        candidate = Calibrations(port, dealt[CALIBRATION], progress=progress).candidate(wanted, engine)
    else:
        candidate = Candidate(wanted, engine)
    seams = _seams(moments, generations, given, seed)
    # seeds of noise, each independent of the others: two halves of every cloud, both sides of a seam
    noise = range(4 * seed, 4 * seed + 4)

    def drawn(act: Act, label: str) -> tuple[NDArray[np.float64], Roughness]:
        """A cloud in two halves, and how rough it is. All methods have the same noise: see `measure.distance`."""
        bar, scale = label if progress else None, port.action_scale
        cloud = np.concatenate(
            [draw_chunks(act, dealt[DISTANCES], samples // 2, scale, half, progress=bar) for half in noise[:2]], axis=1
        )
        if not len(seams):
            return cloud, Roughness(mean_jerk(cloud), None)
        last, first = (
            draw_chunks(act, pick(observations, side), SEAM_SAMPLES, scale, own)
            for side, own in zip(seams.T, noise[2:], strict=True)
        )
        return cloud, Roughness(
            mean_jerk(cloud), float(np.linalg.norm(first[:, :, 0] - last[:, :, -1], axis=-1).mean())
        )

    with running(port, candidate) as fast:  # a schedule that does not fit is refused before anything is drawn
        with running(port, Candidate(engine=engine)) as plain:
            full, full_roughness = drawn(plain.act, "full precision")
        found, roughness = drawn(fast.act, name or "the schedule")
        stats = fast.stats()
    apart = _distances(found, full)
    return Check(
        policy={"source": source, "fingerprint": port.fingerprint.to_dict()},
        method={
            "name": name,
            **candidate.describe(port),
            "engine": fast.engine,
            "shares_all_noise": candidate.shares_all_noise(port),
            "flops": candidate.flops(port, stats.reused_share if stats else 0.0),
            "full_flops": Candidate().flops(port, 0.0),
        },
        setting={
            "observations": count,
            "samples": samples,
            "features": port.n_action_steps * len(port.action_scale),
            "actions": port.n_action_steps,
            "seams": len(seams),
            "calibration": generations,
            "seed": seed,
            "observed": hash_observations(observations),
            "command": command,
        },
        error=_error(found, full),
        noise_floor=_error(*np.split(full, 2, axis=1)),
        distances=apart,
        floor=_distances(*np.split(full, 2, axis=1)),
        roughness=roughness,
        full_roughness=full_roughness,
        features=action_features(found, full, apart),
    )


def predicted_from(port: Port, found: Cloud, own: Cloud, apart: Distances) -> Prediction:
    """What a method is likely to lose.

    Args:
        port: The policy.
        found: (observations, samples, features) of the method.
        own: The same of the policy as it is.
        apart: How far the two are apart.
    """
    shape = (*found.shape[:2], port.n_action_steps, -1)
    features = action_features(found.reshape(shape), own.reshape(shape), apart)
    return predict_loss(features, port.fingerprint.family or "", port.n_action_steps, found.shape[0] * found.shape[1])


def _distances(found: NDArray[np.float64], reference: NDArray[np.float64]) -> Distances:
    try:
        return distances(flattened(found), flattened(reference))
    except ValueError as error:  # NaN, or a policy that draws no noise
        raise PolicyError(f"the actions cannot be compared: {error}") from error


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
