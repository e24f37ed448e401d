"""The data that losses are predicted from: every method that results files know, drawn again without a simulator.

A results file says exactly what ran (sampler and updates), so nothing is calibrated anew. Methods that decide while they run
are left out: how they do is not written down. Where the score is success, episodes can be read as if they had ended earlier;
that is done for tasks whose own limit of steps tells too little, where more methods are then shown to lose. Knows nothing of
pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from blockcache.compare.candidates import Candidate, running
from blockcache.errors import ObservationError
from blockcache.files import digest
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.features import ActionFeatures, Chunks, action_features
from blockcache.models.port import Port
from blockcache.observations import batch_size, pick
from blockcache.progress import progress_bar
from blockcache.results.rollouts import BASELINE, SETTLED, MethodRun, Record, Results
from blockcache.results.summary import MethodSummary, most_rollouts, summarise
from blockcache.samplers import SamplerConfig
from blockcache.schedule import Schedule
from blockcache.tasks.variants import MARK
from blockcache_lab.studies.loss_data import LEAST_LOST, LossData, LossRow

OBSERVATIONS, SAMPLES = 40, 32
LEAST_SCORE = 0.5
"""Of the full policy: one that mostly fails cannot show what a method loses."""
IN_TIME = 90
"""In percent: of the full policy's own successes, those that a tighter limit of steps leaves."""


def measure_losses(
    results: Iterable[Results],
    ports: Mapping[str, tuple[Port, Any]],
    known: LossData | None = None,
    *,
    seed: int = 0,
    progress: bool = True,
    tell: Callable[[str], object] = print,
) -> LossData:
    """A row for each method of each policy, of all pairs of rollouts that the files have of it.

    Args:
        results: Of any tasks and policies.
        ports: The policy and its observations by the policy's source; results of others are left out.
        known: Rows of an earlier run; features that stand there are not measured again.
        seed: Of the noise and of the choice of observations.
        progress: Whether to show bars.
        tell: Is told which policies and methods are left out, since their actions cannot be compared.
    """
    tasks: dict[str, dict[str, list[Results]]] = {}
    left_out: dict[str, str] = {}
    for found in results:
        source, task = found.policy["source"], found.task["name"]
        if found.clocked:  # what delays cost is not what a method costs
            continue
        if source in ports:
            tasks.setdefault(task, {}).setdefault(source, []).append(found)
        else:
            left_out[f"{source} on {task}"] = "no such policy is shipped"
    before = {(row.policy, row.ran): row.features for row in (known.rows if known else ())}
    rows: list[LossRow] = []
    for task, policies in tasks.items():
        name, summaries = _that_tells_more(task, policies)
        for source, methods in summaries.items():
            score = methods[BASELINE].score
            if score is None or score.mean < LEAST_SCORE:
                reached = "nothing" if score is None else f"{score.mean:.2f}"
                left_out[f"{source} on {task}"] = f"full precision scores {reached}, below {LEAST_SCORE:g}"
                continue
            drawn = list(_rows(name, source, *ports[source], methods, before, seed, progress, tell))
            if not drawn:
                left_out[f"{source} on {task}"] = "its methods execute chunks otherwise, or decide while they run"
            rows += drawn
    return LossData(OBSERVATIONS, SAMPLES, tuple(rows), left_out)


def in_time(results: Results, steps: int) -> Results:
    """The same rollouts as they would have been recorded with fewer steps, of a task whose score is success.

    Args:
        results: Of whole episodes, which end with success.
        steps: That an episode has at most.
    """
    return replace(results, records=tuple(_ended(record, steps) for record in results.records))


def _ended(record: Record, steps: int) -> Record:
    if record.error is not None:
        return record
    success = bool(record.success) and record.steps <= steps
    return replace(record, success=success, score=float(success), steps=min(record.steps, steps))


def _that_tells_more(
    task: str, policies: Mapping[str, Sequence[Results]]
) -> tuple[str, dict[str, dict[str, MethodSummary]]]:
    """The rows of each policy, at the task's own limit of steps or at a tighter one; and what the task is called then.

    With a tighter limit, whoever moves more slowly loses, which no look at single chunks can see: so the own one counts
    where it tells enough.
    """
    own = {source: _summaries(found) for source, found in policies.items()}
    full = [record for files in policies.values() for found in files for record in found.of(BASELINE).values()]
    by_success = all(record.score == record.success for record in full) and any(record.success for record in full)
    if not by_success or MARK in task or _lost(own) >= LEAST_LOST:
        return task, own
    steps = int(np.percentile([record.steps for record in full if record.success], IN_TIME))
    tight = {source: _summaries([in_time(one, steps) for one in found]) for source, found in policies.items()}
    return (f"{task}{MARK}steps={steps}", tight) if _lost(tight) > _lost(own) else (task, own)


def _lost(summaries: Mapping[str, Mapping[str, MethodSummary]]) -> int:
    rows = [row for methods in summaries.values() for row in methods.values()]
    return sum(row.difference is not None and row.difference.high < 0 for row in rows)


def _summaries(files: Sequence[Results]) -> dict[str, MethodSummary]:
    """Each method with the pairs of all files that ran the very same, under whatever name; of several things that ran under
    one name, the one with the most pairs. What ran under several names counts once, under the first."""
    methods: dict[
        str, dict[_Run, MethodRun]
    ] = {}  # by name and by what ran: as the file describes it that it is first in
    records: dict[_Run, dict[int, Record]] = {}
    rows: list[MethodSummary] = []
    for found in sorted(files, key=lambda one: len(one.records), reverse=True):
        if found.setting.get(SETTLED):  # when it ended depended on how it went: not to be mixed with others
            rows += summarise(found)
            continue
        for method in found.methods:
            run = _run_of(method)
            methods.setdefault(method.name, {}).setdefault(run, method)
            kept = records.setdefault(run, {})
            kept.update({seed: record for seed, record in found.of(method.name).items() if seed not in kept})
    for name, variants in methods.items():
        for run, method in variants.items():
            own = [replace(record, method=name) for record in records[run].values()]
            full = [] if name == BASELINE else [one for other in methods[BASELINE] for one in records[other].values()]
            rows += summarise(replace(files[0], methods=(method,), records=(*own, *full), clocked=()))
    once: dict[_Run, MethodSummary] = {}
    for row in most_rollouts(rows).values():
        run = _run_of(row.method)
        if run not in once or row.count > once[run].count:
            once[run] = row
    return {row.method.name: row for row in once.values()}


_Run: TypeAlias = tuple[bool, str, str]


def _run_of(method: MethodRun) -> _Run:
    """Whether it is what the others are compared with, what ran, and how its chunks were executed."""
    return method.name == BASELINE, what_ran(method), digest(method.execution)


def what_ran(method: MethodRun) -> str:
    """A digest of the sampler and of what is reused when: the same for methods that do the same.

    Args:
        method: As the results of rollouts describe it.
    """
    return digest({"sampler": method.sampler, "reuse": method.reuse})[:16]


def _rows(
    task: str,
    source: str,
    port: Port,
    observations: Any,
    methods: Mapping[str, MethodSummary],
    known: Mapping[tuple[str, str], ActionFeatures],
    seed: int,
    progress: bool,
    tell: Callable[[str], object],
) -> Iterator[LossRow]:
    if batch_size(observations) < OBSERVATIONS:
        raise ObservationError(
            f"the data on losses are of {OBSERVATIONS} observations, and {source} has {batch_size(observations)}; record "
            "more with 'blockcache policy observe'"
        )
    chosen = np.random.default_rng(seed).permutation(batch_size(observations))[:OBSERVATIONS]
    seen = pick(observations, sorted(chosen.tolist()))
    own: Chunks | None = None
    full = methods[BASELINE].method.flops
    for name, row in progress_bar(methods.items(), source, unit="method", disable=not progress):
        candidate, ran = candidate_of(row.method), what_ran(row.method)
        if candidate is None or row.difference is None:
            continue
        features = known.get((source, ran))
        if features is None:
            own = _chunks(port, Candidate(engine="auto"), seen, seed) if own is None else own
            try:
                features = action_features(_chunks(port, candidate, seen, seed), own)
            except ValueError as error:  # such as a policy that draws no noise
                tell(f"{name} of {source} is left out: {error}")
                continue
        yield LossRow(
            task=task,
            family=port.fingerprint.family or "",
            policy=source,
            method=name,
            ran=ran,
            cost=row.method.flops / full if full else 1.0,
            actions=port.n_action_steps,
            features=features,
            difference=row.difference,
        )


def candidate_of(method: MethodRun) -> Candidate | None:
    """What ran; None for the full policy, for what decides while it runs, and for another execution, which no features of
    single chunks can see.

    Args:
        method: As the results of rollouts describe it.
    """
    reuse = method.reuse or {}
    if method.name == BASELINE or set(reuse) - {"updates"} or method.execution is not None:
        return None
    sampler = SamplerConfig.from_dict(method.sampler)
    schedule = Schedule(sampler.num_inference_steps, reuse["updates"]) if reuse else None
    return Candidate(schedule, "auto", sampler)


def _chunks(port: Port, candidate: Candidate, observations: Any, seed: int) -> Chunks:
    with running(port, candidate) as fast:
        return draw_chunks(fast.act, observations, SAMPLES, port.action_scale, seed)
