"""Tune: the best sampler, schedule and number of threads for one policy, on this machine, for a deadline or a loss.

Every method has a short trial, the promising ones a longer one (successive halving), and the best few are rolled out if
there is a task. What is finished is kept, so that a tuning that was killed goes on where it was. Knows nothing of plots.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockcache.compare.dealing import DISTANCES, count_given, deal, sizes_for_tuning
from blockcache.compare.evaluation import prepare
from blockcache.compare.jobs import Backend, one_by_one
from blockcache.compare.methods import FULL, Method, parse_method
from blockcache.compare.parts import FewerSteps, FittedSteps
from blockcache.compare.replanning import replan
from blockcache.compare.reuse_parts import ActionBudget
from blockcache.compare.time_box import TimeBox
from blockcache.compare.trials import FINAL, Trials
from blockcache.compare.tuned import Tuned
from blockcache.files import Count, Format, PathLike, make_directory
from blockcache.measure.machine import describe
from blockcache.measure.statistics import Estimate
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, hash_observations
from blockcache.results.rollouts import BASELINE, FRESH_SEEDS
from blockcache.results.summary import summarise
from blockcache.results.tuning import Goal, Point, Tuning, TuningError, choose, front, promising
from blockcache.samplers import Diffusion
from blockcache.tasks import task_spec
from blockcache_runtime.session import RATE_HZ

STATE = Format(
    "blockcache.tuning-state",
    "tuning state",
    {"policy": dict, "machine": str, "observations": str, "seed": Count},
    again="tune into another directory",
)
KEPT_SPREAD = (0.9, 1.1)
STEPS, DDIM_STEPS, CHOSEN_STEPS, FIRST_CHOSEN = (10, 16, 5, 25, 8, 6, 4), (10, 6), (3, 4, 5, 6, 8), 5
OWN_BUDGETS, BUDGETS = (0.5, 0.35, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05), (0.8, 0.65, 0.5)
FINALISTS, ROLLED_OUT = 5, 3
TUNING_SEEDS = -10_000
"""From a task's first test seed: nobody calibrates, evaluates or trains on them by default."""


def tune(
    policy: Any,
    observations: Any,
    *,
    state: PathLike | None = None,
    deadline_ms: float | None = None,
    loss: float | None = None,
    task: str | None = None,
    rollouts: int = 200,
    minutes: float = 10.0,
    keep_sampler: bool = False,
    keep_spread: bool = False,
    engine: str = "auto",
    rate_hz: float = RATE_HZ,
    seed: int = 0,
    source: str = "",
    command: str = "",
    backend: Backend = one_by_one,
    started: float | None = None,
    progress: bool = True,
) -> Tuned:
    """The best that fits, and why it may be trusted.

    Args:
        policy: A policy object of any known family, or its port.
        observations: A batch from closed-loop states over whole episodes, such as `blockcache policy observe` records.
        state: A directory that keeps what is finished, so that the same call goes on from there; None keeps nothing.
        deadline_ms: For one chunk: the least loss within it, where there is a task also by replanning; or
        loss: Of the score that may be lost: the fastest within it.
        task: By name: the best few are rolled out, and the winner again on seeds that played no part in the choice.
        rollouts: Pairs on tuning seeds, and as many on fresh ones.
        minutes: In which all but the rollouts is done, which come on top. In more of them the policy's own actions are known
            better, and more is tried; with the same `state` a call goes on from where the last one was.
        keep_sampler: Only schedules, under the policy's own sampler.
        keep_spread: Only methods whose actions keep the spread of the policy's own.
        engine: For every method.
        rate_hz: How often a control loop asks for a chunk: calls are timed at that rate, not back to back.
        seed: Of all noise and of the split of the observations.
        source: Where the policy came from, for the record.
        command: What somebody typed, for the record.
        backend: Runs the rollouts, see `jobs`.
        started: When the minutes began, by `time.monotonic`; with this call unless given.
        progress: Whether to show bars.
    """
    goal = Goal(deadline_ms, loss, KEPT_SPREAD if keep_spread else None, rollouts=task is not None)
    if not (minutes > 0 and rollouts > 0 and rate_hz > 0):
        raise TuningError(f"tuning needs minutes, rollouts and a rate above 0, got {minutes}, {rollouts} and {rate_hz}")
    box = TimeBox(minutes, started, progress)
    port = port_of(policy)
    dealt = deal(observations, {}, sizes_for_tuning(count_given(observations, "tuning")), seed)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()) if state is None else state)
        _claim(directory, port, observations, seed)
        how: dict[str, Any] = {"engine": engine, "rate_hz": rate_hz, "seed": seed, "progress": progress}
        trials = Trials(port, dealt, directory, box, **how)
        tried = _try_methods(trials, goal, keep_sampler)
        _check_tried(trials, tried, minutes)
        plain_ms, points = trials.timed(sorted(tried, key=goal.order))
        fresh, notes = None, [*trials.refused.values()]
        if unlike := trials.predicted.unlike:
            more = "; roll out with --task" * (task is None)
            notes.append(f"nothing is promised of any method's loss: {unlike}{more}")
        if where := trials.predicted.where:
            notes.append(f"the policy beside those that losses were learnt on: {where}")
        if task is None:
            chosen = choose(_measured_most(points), goal)
        else:

            def differences(points: Sequence[Point], first_seed: int) -> dict[str, Estimate]:
                names = {trials.as_files(parse_method(point.method)): point.method for point in points}
                evaluation = prepare(
                    port,
                    task,
                    list(names),
                    observations,
                    state=directory / "rollouts",
                    source=source,
                    rollouts=rollouts,
                    first_seed=task_spec(task).first_test_seed + first_seed,
                    engine=engine,
                    progress=progress,
                )
                rows = summarise(evaluation.run(backend, progress=progress))
                found = {row.method.name: row.difference for row in rows if row.difference is not None}
                return {names[method]: found[method.name] for method in names if method.name in found}

            points = roll_out(points, goal, lambda points: differences(points, TUNING_SEEDS))
            chosen = choose([point for point in points if point.rollouts or point.method == BASELINE], goal)
            points, chosen = replan(
                points, chosen, goal, port.n_action_steps, rate_hz, lambda points: differences(points, TUNING_SEEDS)
            )
            if chosen.method != BASELINE:
                fresh = differences([chosen], FRESH_SEEDS)[chosen.method]
    if late := [name for name in dict.fromkeys(trials.late) if name not in trials.candidates]:
        more = "the same command with more minutes goes on from here"
        notes.append(f"not tried, as the time was up: {', '.join(late)}; {more}")
    tuning = Tuning(
        policy={"source": source, "fingerprint": port.fingerprint.to_dict()},
        goal=goal,
        setting={
            "observations": {name: batch_size(part) for name, part in dealt.items()}
            | {DISTANCES: batch_size(trials.observations)},
            "observed": hash_observations(observations),
            "seed": seed,
            "minutes": minutes,
            "task": task,
            "rollouts": 0 if task is None else rollouts,
            "seconds": round(box.passed, 1),
            "rate_hz": rate_hz,
            "command": command,
        },
        machine=describe(),
        plain_ms=plain_ms,
        points=tuple(sorted(points, key=lambda point: point.cost_ms)),
        chosen=chosen,
        fresh=fresh,
        notes=tuple(notes),
    )
    method = parse_method(chosen.method)
    return Tuned(tuning, trials.sampler_of(method), trials.schedule_of(method))


def _check_tried(trials: Trials, points: Sequence[Point], minutes: float) -> None:
    """Refuse to choose where there is nothing to choose from, and say what would help."""
    if any(point.method != BASELINE for point in points):
        return
    refused = trials.refused
    if FULL in refused or not trials.late:  # without the policy as it is there is nothing to compare with
        why = [refused[FULL]] if FULL in refused else refused.values()
        raise TuningError(f"no method could be tried: {'; '.join(why)}")
    raise TuningError(
        f"nothing was tried: {minutes:g} minutes were over before a method could be compared with the policy as it is; give "
        f"it {max(trials.minutes_needed, 2 * minutes):g} minutes (--minutes), which go on from what is kept in the state"
    )


def _try_methods(trials: Trials, goal: Goal, keep_sampler: bool) -> list[Point]:
    """The points that are worth timing: the finalists, and besides them, as first tried, the front and what anybody would
    try without tuning. Plain fewer steps come first: they take the least time to try."""
    trials.begin(goal.deadline_ms)
    port, samples = trials.port, trials.first_samples
    free = not keep_sampler and port.sampler is not None
    simple = [FULL, *(_fewer_steps(port) if free else ())]
    points = trials.measure(simple, samples)
    if free and isinstance(port.sampler, Diffusion):
        points += try_chosen_samplers(trials, goal, most=len(port.timesteps))
    if free:
        points += trials.measure(cached_methods(points, goal), samples)
    budgets = OWN_BUDGETS[2:5] if free else OWN_BUDGETS
    points += trials.measure([Method(reuse=ActionBudget(budget)) for budget in budgets], samples)
    names = {method.name for method in simple}
    rest = {point.method: point for point in points if point.method in names or point in front(points)}
    return list((rest | try_finalists(trials, points, goal)).values())


def try_finalists(trials: Trials, points: list[Point], goal: Goal) -> dict[str, Point]:
    """The most promising points with more samples. The first trial is optimistic about the points that it ranks highest:
    where none of these still meets the goal, the next ones that seemed to are tried too, as long as there is time.

    Args:
        trials: Of the policy.
        points: Of the first trials.
        goal: What is asked for.
    """
    tried: dict[str, Point] = {}
    waiting, samples = points, trials.final_samples(FINALISTS)
    while waiting:
        finalists = promising(waiting, goal, FINALISTS)
        found = trials.measure([parse_method(point.method) for point in finalists], samples, FINAL)
        tried |= {point.method: point for point in found}
        waiting = [point for point in waiting if point not in finalists]
        if not found or any(goal.miss(point) == 0 for point in tried.values()):
            break
        if all(goal.miss(point) > 0 for point in waiting):
            break
    return tried


def roll_out(
    points: list[Point], goal: Goal, differences: Callable[[Sequence[Point]], Mapping[str, Estimate]]
) -> list[Point]:
    """All points, the best few of them rolled out. Predictions are optimistic too: where none of these rules the loss out
    that was asked for, the next ones are rolled out. The full policy is what the others are compared with.

    Args:
        points: That were tried.
        goal: What is asked for.
        differences: Gives points' paired differences of the score to the full policy, by the names of their methods.
    """
    waiting = [point for point in points if point.method != BASELINE and goal.miss(point) < math.inf]
    rolled: dict[str, Estimate] = {}
    while waiting:
        best = promising(_measured_most(waiting), goal, ROLLED_OUT)
        rolled |= differences(best)
        points = [replace(point, rollouts=rolled.get(point.method)) for point in points]
        waiting = [point for point in waiting if point not in best]  # also what could not be rolled out
        if goal.loss is None or any(point.rollouts and goal.miss(point) == 0 for point in points):
            break
    return points


def _measured_most(points: list[Point]) -> list[Point]:
    """Those of the longest trial: a first one is not enough to be chosen by, unless there was no time for another. The
    policy as it is needs none: it loses nothing."""
    most = max((point.chunks for point in points if point.method != BASELINE), default=0)
    return [point for point in points if point.chunks >= most or point.method == BASELINE]


def _fewer_steps(port: Port) -> list[Method]:
    """Fewer steps, off the shelf: of the policy's own sampler, and of DDIM."""
    assert port.sampler is not None
    kind, most = port.sampler.type, len(port.timesteps)
    parts = [FewerSteps(kind, steps) for steps in STEPS if steps < most]
    if isinstance(port.sampler, Diffusion) and kind != "ddim":
        parts += [FewerSteps("ddim", steps) for steps in DDIM_STEPS if steps < most]
    return list(map(Method, parts))


def try_chosen_samplers(trials: Trials, goal: Goal, most: int) -> list[Point]:
    """Placed and fitted steps, which take minutes to choose: so few numbers of steps are tried, one after the other towards
    what the goal allows. Fewer steps while the loss is small enough, more while the deadline is kept, and the other way.

    Args:
        trials: Of the policy.
        goal: What is asked for.
        most: Fewer steps than these.
    """
    numbers = [steps for steps in CHOSEN_STEPS if steps < most]
    points: list[Point] = []
    place, way = max((n for n, steps in enumerate(numbers) if steps <= FIRST_CHOSEN), default=0), 0
    while 0 <= place < len(numbers):
        fitted = FittedSteps(numbers[place], 1.0) if goal.spread else FittedSteps(numbers[place])
        methods = [Method(FewerSteps("ddpm", numbers[place], placed=True)), Method(fitted)]
        points += (found := trials.measure(methods, trials.first_samples))
        met = any(goal.miss(point) == 0 for point in found)
        towards = -1 if met == (goal.loss is not None) else 1
        if not found or towards == -way:
            break
        way, place = towards, place + towards
    return points


def cached_methods(points: list[Point], goal: Goal) -> list[Method]:
    """The best samplers so far with part of their blocks' outputs reused: a sampler that is too slow may fit then.

    Args:
        points: That were tried.
        goal: What is asked for.
    """
    methods = {point: parse_method(point.method) for point in points}
    bare = [point for point, method in methods.items() if method.sampler and not method.reuse]
    by_loss = sorted(bare, key=lambda point: (point.loss, point.p50_ms))[:2]
    wanted = sorted(bare, key=goal.order)[:2]
    samplers = dict.fromkeys(methods[point].sampler for point in (*wanted, *by_loss))
    return [Method(sampler, ActionBudget(budget)) for sampler in samplers for budget in BUDGETS]


def _claim(state: Path, port: Port, observations: Any, seed: int) -> None:
    """A directory belongs to one policy on one machine: times of another one would be mixed with these."""
    now = {
        "policy": port.fingerprint.to_dict(),
        "machine": f"{describe()['processor']}, {describe()['cores']} cores",
        "observations": hash_observations(observations),
        "seed": seed,
    }
    file = state / "tuning-state.json"
    if file.exists():
        before: Mapping[str, Any] = STATE.load(file)
        odd = [name for name in now if before[name] != now[name]]
        if odd:
            raise TuningError(
                f"{state} holds a tuning with another {' and '.join(odd)}; tune into another directory, or delete this one"
            )
        return
    make_directory(state)
    STATE.save(file, now)
