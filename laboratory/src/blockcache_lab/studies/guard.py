"""What a guard notices, and whether answering in full precision helps then: rollouts of a task that was changed.

Every way of answering sees the same episodes with the same noise; only full precision draws more. Two signals are compared:
the distance of observations, which guards use, and how much cached blocks change from update to update. Knows no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from blockcache.attach.generation import Generation, LayerCall, attach
from blockcache.attach.recorder import calibrate, relative_change
from blockcache.engines import export_policy
from blockcache.models.port import Port
from blockcache.models.sampling import generate
from blockcache.observations import parts
from blockcache.observations.guard import cloud_of, fit
from blockcache.progress import progress_bar
from blockcache.schedule import Plan, Reuse, Schedule, compile_plan
from blockcache.solvers import solve
from blockcache.tasks import Clock, clocked_rollout, make_task
from blockcache.tasks.base import Array, Task
from blockcache_runtime import ExportedPolicy
from blockcache_runtime.guard import GuardWatch, Judgement

FIRST_SEED = 170_000
"""Nothing was chosen or tuned on these seeds."""
STALE, OF = 16, 48  # of so many ticks the sensor stands still in the last few
CHANGES = 96
"""Observations of each kind that the changes of blocks are looked at in."""
UPDATES, UNION, CALIBRATED = 7, 3, 32


class ChangedTask:
    """Push-T with something changed that the policy was never shown.

    Args:
        task: The simulator.
        moved: The goal lies so many pixels farther right and down, and all is seen and done as if it did not: what a robot
            does whose target was moved.
        offset: The block is seen so many pixels beside where it is.
        stale: Whether the sensor stands still now and then.
    """

    def __init__(self, task: Any, moved: float = 0.0, offset: float = 0.0, stale: bool = False) -> None:
        self._task, self._moved, self._stale = task, moved, stale
        self._added = np.full(20, -moved, dtype=np.float32)
        self._added[:18:2] += offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def reset(self, seed: int) -> Array:
        self._task.reset(seed)
        self._task.move_goal(self._moved, self._moved)
        self._ticks, self._seen = 0, self._task.observe()
        return self.observe()

    def observe(self) -> Array:
        if not self._stale or self._ticks % OF < OF - STALE:
            self._seen = self._task.observe()
        return np.asarray(self._seen + self._added, dtype=np.float32)

    def step(self, action: Array) -> None:
        self._ticks += 1
        self._task.step(np.asarray(action) + self._moved)


SHIFTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "none": ("nothing is changed", {}),
    "target-60": ("the target moved by 60 px", {"moved": 60.0}),
    "target-120": ("the target moved by 120 px", {"moved": 120.0}),
    "block-30": ("the block is seen 30 px beside", {"offset": 30.0}),
    "block-60": ("the block is seen 60 px beside", {"offset": 60.0}),
    "stale": (f"the sensor stands still, {STALE} of {OF} ticks", {"stale": True}),
}
"""By name: words for it, and arguments of `ChangedTask`."""
WAYS = FULL, ALONE, FALLING_BACK = "full precision", "alone", "with fall-back"


def guard_study(
    port: Port,
    observations: npt.NDArray[np.float32],
    tuned: Path | None,
    shift: str,
    *,
    command: str,
    rollouts: int = 100,
) -> dict[str, Any]:
    """Alarms, and scores in full precision, alone and with fall-back, under one shift.

    Args:
        port: A policy of Push-T.
        observations: What its guard is fitted to, (N, moments, 20).
        tuned: What `tune` wrote for it, if that is looked at, too.
        shift: One of `SHIFTS`.
        command: What somebody typed for it, for the record.
        rollouts: Episodes of each cell.
    """
    seen = [port.prepare_observation(one) for one in parts(observations, 1)[:CALIBRATED]]
    schedule = solve(calibrate(port, seen), updates=UPDATES, union=UNION)
    methods: dict[str, dict[str, Any]] = {f"BAC S={UPDATES} n={UNION}": {"schedule": schedule}}
    if tuned is not None:
        methods["tuned"] = {"schedule": None, "tuned": tuned}
    words, changes = SHIFTS[shift]
    scores: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as place:
        for name, settings in methods.items():
            path = Path(place) / f"{len(rows)}.onnx"
            export_policy(port, path=path, guard="full", observations=observations, **settings)
            policy = ExportedPolicy(path, 1)
            ways = [way for way in WAYS if way != FULL or not rows]  # full precision is the same for every method
            bar = progress_bar(ways, name, unit="way")
            rolled = {way: _rolled(partial(_changed, changes), policy, rollouts, way) for way in bar}
            scores = scores | {way: found.scores for way, found in rolled.items()}
            alone = rolled[ALONE]
            row = {"method": name, "scores": scores, "chunks": sum(map(len, alone.judged)), **alone.alarms}
            if settings["schedule"] is not None:  # it has cached blocks
                row["changes"] = _ChangeSignal(port, schedule, observations).alarms(alone.observed)
            rows.append(row)
    about = {"command": command, "shift": shift, "words": words, "rollouts": rollouts, "first_seed": FIRST_SEED}
    return {**about, "observations": len(observations), "rows": rows}


def other_tasks(observations: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Guards of several policies that observe alike: how much of each other's observations, and of their own that they were
    not fitted to, they find outside.

    Args:
        observations: By policy, (N, moments, numbers) under "obs".
    """
    found = []
    for name, own in observations.items():
        half = len(own["obs"]) // 2
        known = {"obs": own["obs"][:half]}
        guard = fit(known, {"obs": known["obs"].shape[1:]}, ())
        shown = {other: given["obs"] if other != name else own["obs"][half:] for other, given in observations.items()}
        shares = {other: float(GuardWatch(guard).judge({"obs": obs}).outside.mean()) for other, obs in shown.items()}
        found.append({"guard": name, "outside": shares})
    return found


class _Rolled:
    """Scores of all episodes, and what the guard found whenever a chunk was asked for."""

    def __init__(self, rollouts: int) -> None:
        self.scores: list[float] = []
        self.judged: list[list[Judgement]] = [[] for _ in range(rollouts)]
        self.observed: list[npt.NDArray[np.float32]] = []

    @property
    def alarms(self) -> dict[str, float]:
        """Of all chunks, how many were outside or repeated; of all episodes, those with one outside."""
        every = [one for row in self.judged for one in row]
        return {
            "outside": float(np.mean([one.outside[0] for one in every])),
            "repeated": float(np.mean([one.repeated[0] for one in every])),
            "episodes": float(np.mean([any(one.outside[0] for one in row) for row in self.judged])),
        }


def _changed(changes: Mapping[str, Any]) -> Task:
    return ChangedTask(make_task("pusht"), **changes)


def _rolled(factory: Callable[[], Task], policy: ExportedPolicy, rollouts: int, way: str) -> _Rolled:
    found, seeds = _Rolled(rollouts), [FIRST_SEED + place for place in range(rollouts)]
    assert policy.watch is not None
    quiet = replace(policy.watch.guard, action="count")
    watches = [GuardWatch(quiet) for _ in seeds]  # each episode is a client of its own

    def answer(seen: Any, places: Sequence[int], chunks: Sequence[int], previous: Any) -> Array:
        observed = policy.check_observation(seen)
        rngs = [np.random.default_rng((seeds[place], chunk)) for place, chunk in zip(places, chunks, strict=True)]
        noise = np.concatenate([policy.draw_noise(1, rng) for rng in rngs], axis=1)
        judged = [watches[place].judge({"obs": observed["obs"][row : row + 1]}) for row, place in enumerate(places)]
        for place, one, obs in zip(places, judged, observed["obs"], strict=True):
            found.judged[place].append(one)
            found.observed.append(obs)
        scores = np.concatenate([one.scores for one in judged])
        asked = {ALONE: 0.0 * scores, FALLING_BACK: scores, FULL: scores + np.inf}[way]
        answers = policy.answer(observed, noise, rngs, Judgement(asked, scores > np.inf))
        return policy.due_actions(answers)

    clock = Clock(10.0, policy.n_action_steps, (0.0,))
    rolled = clocked_rollout(factory, answer, seeds, clock, n_obs_steps=policy.n_obs_steps)
    found.scores = [float(one.score or 0.0) for one in rolled]
    return found


class _ChangeSignal:
    """The other signal: how much each cached block changed from one update to the next, as a guard would see it."""

    def __init__(self, port: Port, schedule: Schedule, observations: npt.NDArray[np.float32]) -> None:
        self._port, self._plan = port, compile_plan(schedule)
        self._cloud = cloud_of(self._changes(observations))

    def alarms(self, observed: Sequence[npt.NDArray[np.float32]]) -> float:
        """The share of observations whose changes are farther than those of held-out ones."""
        step = max(len(observed) // CHANGES, 1)
        return float((self._cloud.distances(self._changes(np.stack(observed[::step]))) > 1).mean())

    def _changes(self, obs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """(N, updates of all blocks but their first)."""
        watched = _Watched(self._plan)
        with attach(self._port, lambda: watched):
            generate(getattr(self._port.policy, self._port.entry), self._port.prepare_observation(obs), 0)
        changes = np.stack([one.numpy() for one in watched.changes], axis=1).astype(np.float64)
        return np.asarray(np.log(np.maximum(changes, 1e-6)))


class _Watched(Generation):
    def __init__(self, plan: Plan) -> None:
        self.reuse: Reuse[Tensor] = Reuse(plan)
        self.changes: list[Tensor] = []
        self._last: dict[str, Tensor] = {}

    def layer(self, call: LayerCall) -> Tensor:
        def route(name: str, compute: Callable[[], Tensor]) -> Tensor:
            def watched() -> Tensor:
                new = compute()
                if name in self._last:
                    self.changes.append(relative_change(new.detach(), self._last[name]))
                self._last[name] = new.detach()
                return new

            return self.reuse.block(call.step, name, watched)

        return call.routed(route)
