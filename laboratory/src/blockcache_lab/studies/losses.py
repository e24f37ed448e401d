"""The data that losses are predicted from: every method that results files know, drawn again without a simulator.

A results file says exactly what ran (sampler and updates), so nothing is calibrated anew. Methods that decide while they run
are left out: how they do is not written down. Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from blockcache.compare.candidates import Candidate, running
from blockcache.errors import ObservationError
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.features import Chunks, action_features
from blockcache.models.port import Port
from blockcache.observations import batch_size, pick
from blockcache.progress import progress_bar
from blockcache.results.losses import LossData, LossRow
from blockcache.results.rollouts import BASELINE, MethodRun, Results
from blockcache.results.summary import MethodSummary, most_rollouts, summarise
from blockcache.samplers import SamplerConfig
from blockcache.schedule import Schedule

OBSERVATIONS, SAMPLES = 40, 32
LEAST_SCORE = 0.5
"""Of the full policy: one that mostly fails cannot show what a method loses."""


def measure_losses(
    results: Iterable[Results], ports: Mapping[str, tuple[Port, Any]], *, seed: int = 0, progress: bool = True
) -> LossData:
    """A row for each method of each policy, with the most rollouts that any of the files has.

    Args:
        results: Of any tasks and policies.
        ports: The policy and its observations by the policy's source; results of others are left out.
        seed: Of the noise and of the choice of observations.
        progress: Whether to show bars.
    """
    by_policy: dict[tuple[str, str], list[MethodSummary]] = {}
    for found in results:
        if found.policy["source"] in ports:
            by_policy.setdefault((found.task["name"], found.policy["source"]), []).extend(summarise(found))
    rows: list[LossRow] = []
    for (task, source), summaries in by_policy.items():
        port, observations = ports[source]
        rows += _rows(task, source, port, observations, most_rollouts(summaries), seed, progress)
    return LossData(OBSERVATIONS, SAMPLES, tuple(rows))


def _rows(
    task: str, source: str, port: Port, observations: Any, methods: dict[str, MethodSummary], seed: int, progress: bool
) -> Iterator[LossRow]:
    full = methods[BASELINE].score
    if full is None or full.mean < LEAST_SCORE:
        return
    if batch_size(observations) < OBSERVATIONS:
        raise ObservationError(
            f"the data on losses are of {OBSERVATIONS} observations, and {source} has {batch_size(observations)}; record "
            "more with 'blockcache policy observe'"
        )
    chosen = np.random.default_rng(seed).permutation(batch_size(observations))[:OBSERVATIONS]
    seen = pick(observations, sorted(chosen.tolist()))
    own = _chunks(port, Candidate(engine="auto"), seen, seed)
    for name, row in progress_bar(methods.items(), source, unit="method", disable=not progress):
        candidate = _candidate(row.method)
        if candidate is not None and row.difference is not None:
            yield LossRow(
                task=task,
                family=port.fingerprint.family or "",
                policy=source,
                method=name,
                actions=port.n_action_steps,
                features=action_features(_chunks(port, candidate, seen, seed), own),
                difference=row.difference,
            )


def _candidate(method: MethodRun) -> Candidate | None:
    """What ran; None for the full policy and for what decides while it runs."""
    reuse = method.reuse or {}
    if method.name == BASELINE or set(reuse) - {"updates"}:
        return None
    sampler = SamplerConfig.from_dict(method.sampler)
    schedule = Schedule(sampler.num_inference_steps, reuse["updates"]) if reuse else None
    return Candidate(schedule, "auto", sampler)


def _chunks(port: Port, candidate: Candidate, observations: Any, seed: int) -> Chunks:
    with running(port, candidate) as fast:
        return draw_chunks(fast.act, observations, SAMPLES, port.action_scale, seed)
