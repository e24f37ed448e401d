"""Tune: the best sampler, schedule and number of threads for one policy, on this machine, for a deadline or a loss.

Methods are glanced at, the promising ones looked at for longer (successive halving), the best few rolled out if there is a
task. Whatever is finished is kept, so a tuning that was killed goes on where it was. Knows nothing of plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockcache.compare.evaluation import prepare
from blockcache.compare.jobs import Backend, one_by_one
from blockcache.compare.looks import GLANCE, LONG, Clock, Looks
from blockcache.compare.methods import parse_method
from blockcache.files import Count, Format, PathLike, make_directory
from blockcache.measure.machine import describe
from blockcache.measure.statistics import Estimate
from blockcache.models.policy_files import SAMPLER, SCHEDULE, TUNING
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, hash_observations, pick, split
from blockcache.results.rollouts import BASELINE, FRESH_SEEDS, GENERATIONS
from blockcache.results.summary import summarise
from blockcache.results.tuning import Goal, Point, Tuning, TuningError, choose, front, promising
from blockcache.samplers import ChosenSampler, Diffusion, SamplerConfig
from blockcache.schedule import Schedule
from blockcache.tasks import task_spec

STATE = Format(
    "blockcache.tuning-state",
    "tuning state",
    {"policy": dict, "machine": str, "observations": str, "seed": Count},
    again="tune into another directory",
)
PARTS, LEAST = {"calibration": GENERATIONS, "fitting": 32, "distances": 24}, 8
"""Observations for each purpose; they are never shared. Fewer where there are fewer, but never below the least."""
KEPT_SPREAD = (0.9, 1.1)
STEPS, DDIM_STEPS, CHOSEN_STEPS, FIRST_CHOSEN = (25, 16, 10, 8, 6, 5, 4), (10, 6), (3, 4, 5, 6, 8), 5
OWN_BUDGETS, BUDGETS = (0.5, 0.35, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05), (0.8, 0.65, 0.5)
FINALISTS, ROLLED_OUT = 5, 3
TUNING_SEEDS = -10_000
"""From a task's first test seed: nobody calibrates, evaluates or trains on them by default."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """What `tune` gives back: the sampler and schedule that were chosen, and the evidence.

    chosen    the sampler with its evidence; None is the policy's own
    schedule  for `accelerate`; None computes every block at every step
    """

    tuning: Tuning
    chosen: ChosenSampler | None
    schedule: Schedule | None

    @property
    def sampler(self) -> SamplerConfig | None:
        """For `policy.with_sampler`; None is the policy's own."""
        return None if self.chosen is None else self.chosen.sampler


def tune(
    policy: Any,
    observations: Any,
    *,
    state: PathLike,
    deadline_ms: float | None = None,
    loss: float | None = None,
    task: str | None = None,
    rollouts: int = 200,
    minutes: float = 10.0,
    keep_sampler: bool = False,
    keep_spread: bool = False,
    engine: str = "auto",
    seed: int = 0,
    source: str = "",
    backend: Backend = one_by_one,
    progress: bool = True,
) -> Tuned:
    """The best that fits, and why it may be trusted.

    policy        the policy object, ours or foreign (or its port)
    observations  a batch from closed-loop states over whole episodes, such as `blockcache policy observe` records
    state         a directory that keeps what is finished: the same call goes on from there
    deadline_ms   for one chunk: the least loss within it; or
    loss          of the score that may be lost: the fastest within it
    task          by name: the best few are rolled out, and the winner again on seeds that nobody chose by
    rollouts      pairs on tuning seeds, and as many on fresh ones
    minutes       after which nothing new is looked at; rollouts come on top
    keep_sampler  only schedules, under the policy's own sampler
    keep_spread   only methods whose actions keep the spread of the policy's own
    engine        for every method
    seed          of all noise and of the split of the observations
    source        where the policy came from, for the record
    backend       runs the rollouts, see `jobs`
    """
    goal = Goal(deadline_ms, loss, KEPT_SPREAD if keep_spread else None)
    if not (minutes > 0 and rollouts > 0):
        raise TuningError(f"tuning needs minutes and rollouts above 0, got {minutes} and {rollouts}")
    port = port_of(policy)
    seen = deal(observations, seed)
    _claim(Path(state), port, observations, seed)
    looks = Looks(port, seen, Path(state), Clock(minutes), engine=engine, seed=seed, progress=progress)
    if deadline_ms is not None:
        looks.check_deadline(deadline_ms)
    free = not keep_sampler and port.sampler is not None
    simple = [BASELINE, *(fewer_steps(port) if free else ())]
    points = looks.at(simple, GLANCE)
    if free and isinstance(port.sampler, Diffusion):
        points += at_chosen_samplers(looks, goal, most=len(port.timesteps))
    if free:
        points += looks.at(cached_methods(points, goal), GLANCE)
    budgets = OWN_BUDGETS[2:5] if free else OWN_BUDGETS
    points += looks.at([f"action:budget={budget:g}" for budget in budgets], GLANCE)
    looked = look_longer(looks, points, goal)
    # the rest of the front is shown as it was glanced at, and so is what anybody would try first
    rest = {point.method: point for point in points if point.method in simple or point in front(points)}
    plain_ms, points = looks.timed(list((rest | looked).values()))
    fresh = None
    if task is not None:
        first = task_spec(task).first_test_seed

        def differences(methods: list[str], first_seed: int) -> dict[str, Estimate]:
            names = {looks.as_files(method): method for method in methods}
            evaluation = prepare(
                port,
                task,
                list(names),
                observations,
                state=Path(state) / "rollouts",
                source=source,
                rollouts=rollouts,
                first_seed=first_seed,
                engine=engine,
                progress=progress,
            )
            rows = summarise(evaluation.run(backend, progress=progress))
            return {names[row.method.name]: row.difference for row in rows if row.difference is not None}

        points = roll_out(points, goal, lambda methods: differences(methods, first + TUNING_SEEDS))
        chosen = choose([point for point in points if point.rollouts or point.method == BASELINE], goal)
        if chosen.method != BASELINE:
            fresh = differences([chosen.method], first + FRESH_SEEDS)[chosen.method]
    else:
        chosen = choose(long_looked(points), goal)
    tuning = Tuning(
        policy={"source": source, "fingerprint": port.fingerprint.to_dict()},
        goal=goal,
        setting={
            "observations": {name: batch_size(part) for name, part in seen.items()},
            "observed": hash_observations(observations),
            "seed": seed,
            "minutes": minutes,
            "task": task,
            "rollouts": 0 if task is None else rollouts,
            "seconds": round(looks.clock.passed, 1),
        },
        machine=describe(),
        plain_ms=plain_ms,
        points=tuple(sorted(points, key=lambda point: point.p50_ms)),
        chosen=chosen,
        fresh=fresh,
        notes=tuple(looks.notes),
    )
    strategy = looks.candidates[chosen.method].strategy
    return Tuned(tuning, looks.sampler_of(chosen.method), strategy if isinstance(strategy, Schedule) else None)


def look_longer(looks: Looks, points: list[Point], goal: Goal) -> dict[str, Point]:
    """The most promising for longer. A glance flatters what it puts first: where none of these still meets the goal, the
    next ones that seemed to are looked at too, as long as there is time."""
    looked: dict[str, Point] = {}
    waiting = points
    while waiting:
        finalists = promising(waiting, goal, FINALISTS)
        found = looks.at([point.method for point in finalists], LONG, even_late=not looked)
        looked |= {point.method: point for point in found}
        waiting = [point for point in waiting if point not in finalists]
        if any(goal.miss(point) == 0 for point in looked.values()) or looks.clock.over:
            break
        if all(goal.miss(point) > 0 for point in waiting):
            break
    return looked


def roll_out(
    points: list[Point], goal: Goal, differences: Callable[[list[str]], Mapping[str, Estimate]]
) -> list[Point]:
    """All points, the best few of them rolled out. A prediction may flatter too: where none of these rules the loss out that
    was asked for, the next ones are rolled out. The full policy needs none: it is what the others are compared with."""
    waiting = [point for point in points if point.method != BASELINE and goal.miss(point) < math.inf]
    rolled: dict[str, Estimate] = {}
    while waiting:
        best = promising(long_looked(waiting), goal, ROLLED_OUT)
        rolled |= differences([point.method for point in best])
        points = [replace(point, rollouts=rolled.get(point.method)) for point in points]
        waiting = [point for point in waiting if point not in best]  # also what could not be rolled out
        if goal.loss is None or any(point.rollouts and goal.miss(point) == 0 for point in points):
            break
    return points


def long_looked(points: list[Point]) -> list[Point]:
    """Those of them that were looked at for longest: a glance is not enough to be chosen by."""
    most = max(point.chunks for point in points)
    return [point for point in points if point.chunks == most]


def deal(observations: Any, seed: int) -> dict[str, Any]:
    """Disjoint observations to calibrate on, to choose samplers on, and to measure distances at."""
    spare, wanted = batch_size(observations) - LEAST * len(PARTS), sum(PARTS.values()) - LEAST * len(PARTS)
    share = min(1.0, max(0, spare) / wanted)
    sizes = {name: LEAST + math.floor(share * (size - LEAST)) for name, size in PARTS.items()}
    return {name: pick(observations, places) for name, places in split(observations, sizes, seed).items()}


def fewer_steps(port: Port) -> list[str]:
    """Fewer steps as everybody has them: of the policy's own sampler, and of DDIM."""
    assert port.sampler is not None
    kind, most = port.sampler.type, len(port.timesteps)
    names = [f"{kind}-{steps}" for steps in STEPS if steps < most]
    if isinstance(port.sampler, Diffusion) and kind != "ddim":
        names += [f"ddim-{steps}" for steps in DDIM_STEPS if steps < most]
    return names


def at_chosen_samplers(looks: Looks, goal: Goal, most: int) -> list[Point]:
    """Placed and fitted steps, which take minutes to choose: so few numbers of steps are tried, one after the other towards
    what the goal allows. Fewer steps while the loss is small enough, more while the deadline is kept, and the other way."""
    numbers = [steps for steps in CHOSEN_STEPS if steps < most]
    points: list[Point] = []
    place, way = max((n for n, steps in enumerate(numbers) if steps <= FIRST_CHOSEN), default=0), 0
    while 0 <= place < len(numbers):
        methods = [f"ddpm-{numbers[place]}:placed", f"fitted-{numbers[place]}{':spread=1' if goal.spread else ''}"]
        points += (found := looks.at(methods, GLANCE))
        met = any(goal.miss(point) == 0 for point in found)
        towards = -1 if met == (goal.loss is not None) else 1
        if not found or towards == -way:
            break
        way, place = towards, place + towards
    return points


def cached_methods(points: list[Point], goal: Goal) -> list[str]:
    """The best samplers so far with part of their blocks' outputs reused: a sampler that is too slow may fit then."""
    parsed = {point.method: parse_method(point.method) for point in points}
    bare = [point for point in points if parsed[point.method].sampler and not parsed[point.method].reuse]
    by_loss = sorted(bare, key=lambda point: (point.loss, point.p50_ms))[:2]
    wanted = sorted(bare, key=goal.order)[:2]
    names = dict.fromkeys(point.method for point in (*wanted, *by_loss))
    return [f"{name}+action:budget={budget:g}" for name in names for budget in BUDGETS]


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


def save_tuned(policy: Any, tuned: Tuned, directory: PathLike) -> bool:
    """Write a directory with the sampler, the schedule and the evidence, and with the policy itself where it is one of ours.

    Returns whether it is a policy directory: what only foreign code can save is left out.
    """
    port, place = port_of(policy), Path(directory)
    whole = (port if tuned.sampler is None else port.with_sampler(tuned.sampler)).save(place)
    if not whole:
        make_directory(place)
    if tuned.chosen is not None:
        tuned.chosen.save(place / SAMPLER)
    if tuned.schedule is not None:
        tuned.schedule.save(place / SCHEDULE)
    tuned.tuning.save(place / TUNING)
    return whole
