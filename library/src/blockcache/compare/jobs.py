"""Many independent jobs, run one by one, by local workers or on a Ray cluster; each finished one is kept as a file.

A job is a plain value with a key; what it gives back is a JSON object. A run that was killed, at any moment, goes on
where it was. Knows nothing of policies or of what the jobs are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from blockcache.compare.store import Outcome, Store
from blockcache.extras import installed, require
from blockcache.progress import progress_bar
from blockcache.results.rollouts import EvaluationError
from blockcache_runtime.cores import cores

Work: TypeAlias = Callable[[Any], Outcome]
# (work, jobs) -> (the job's place, its outcome), in the order in which they are finished
Backend: TypeAlias = Callable[[Work, Sequence[Any]], Iterator[tuple[int, Outcome]]]


def run_jobs(
    work: Work,
    jobs: Mapping[str, Any],
    store: Store,
    backend: Backend,
    *,
    keep: Callable[[Any, Outcome], bool] = lambda job, outcome: True,
    check: Callable[[Any, Outcome], object] = lambda job, outcome: None,
    progress: bool = True,
) -> dict[str, Outcome]:
    """The outcome of every job by its key; jobs that the store holds are not run again.

    Args:
        work: Does a job.
        jobs: By key, which is all that an outcome depends on.
        store: Keeps outcomes.
        backend: Runs the jobs that the store does not hold.
        keep: Says which jobs' outcomes the store may hold.
        check: Raises if what the store holds is not what that job gives.
        progress: Whether to show a bar.
    """
    kept = {key: store.get(key, partial(check, job)) for key, job in jobs.items()}
    outcomes = {key: outcome for key, outcome in kept.items() if outcome is not None and keep(jobs[key], outcome)}
    missing = [key for key in jobs if key not in outcomes]
    bar = progress_bar(desc="evaluating", total=len(jobs), initial=len(outcomes), unit="group", disable=not progress)
    with bar:
        for place, outcome in backend(work, [jobs[key] for key in missing]) if missing else ():
            if keep(jobs[missing[place]], outcome):
                store.put(missing[place], outcome)
            outcomes[missing[place]] = outcome
            bar.update()
    return {key: outcomes[key] for key in jobs}


def one_by_one(work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Outcome]]:
    """A backend: in this process.

    Args:
        work: Does a job.
        jobs: In the order in which they are done.
    """
    for place, job in enumerate(jobs):
        yield place, work(job)


def local_workers(count: int | None = None) -> Backend:
    """Processes on this machine, by joblib.

    Args:
        count: How many. None is one for each core, or this process where joblib is missing.
    """
    if count is None:
        count = cores() if installed("joblib") else 1
    if count < 1:
        raise EvaluationError(f"an evaluation needs at least one worker, got {count}")
    if count == 1:
        return one_by_one
    require("joblib", "eval", "an evaluation with more than one worker", error=EvaluationError)
    return partial(_by_joblib, count)


def ray_cluster(address: str) -> Backend:
    """Workers of a Ray cluster.

    Args:
        address: Of the cluster. "local" starts one on this machine; "auto" finds a running one.
    """
    require("ray", "ray", "a Ray cluster", error=EvaluationError)
    return partial(_by_ray, address)


def _by_joblib(count: int, work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Outcome]]:
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import BrokenProcessPool

    parallel = Parallel(n_jobs=count, backend="loky", batch_size=1, return_as="generator_unordered")
    try:
        yield from parallel(delayed(_placed)(work, place, job) for place, job in enumerate(jobs))
    except BrokenProcessPool as error:
        raise _lost() from error


def _by_ray(address: str, work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Outcome]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start reports to nobody
    import ray

    ours = not ray.is_initialized()
    if ours:
        _join_ray(address)
    try:
        remote, shared = ray.remote(num_cpus=1)(_placed), ray.put(work)
        room = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting, flying = list(enumerate(jobs)), list[Any]()
        while waiting or flying:
            now, waiting = waiting[: room - len(flying)], waiting[room - len(flying) :]
            flying += [remote.remote(shared, place, job) for place, job in now]
            done, flying = ray.wait(flying, num_returns=1)
            yield ray.get(done[0])
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, ray.exceptions.RayError):
            raise error.cause from error
        reason = str(error.cause).splitlines()[0]
        raise EvaluationError(f"a Ray worker cannot read its job ({reason}); is the same blockcache there?") from error
    except ray.exceptions.RayError as error:
        raise _lost() from error
    finally:
        if ours:
            ray.shutdown()


def _join_ray(address: str) -> None:
    import ray

    own: dict[str, Any] = {"num_cpus": cores(), "include_dashboard": False}
    try:
        ray.init(**(own if address == "local" else {"address": address}), log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EvaluationError(f"no Ray cluster at {address!r} ({error}); start one with 'ray start --head'") from error


def _placed(work: Work, place: int, job: Any) -> tuple[int, Outcome]:
    return place, work(job)


def _lost() -> EvaluationError:
    return EvaluationError(
        "a worker was killed, perhaps because memory ran out; what was finished is kept, so the same command goes on "
        "from there (with fewer --workers if memory is short)"
    )
