"""Rollouts of any callable: a fixed group of seeds, run side by side as one batch. Knows nothing of policies.

What `act` is does not matter here, so that a baseline and its accelerated form go through the very same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError
from blockcache.observations import stacked
from blockcache.tasks.base import Array, Task, TaskSpec, Tree
from blockcache_runtime.chunks import Due, Watcher

# (observations (B, n_obs_steps, obs_dim), or such arrays by name, and the index of the chunk)
# -> actions (B, n_action_steps, action_dim)
Act: TypeAlias = Callable[[Any, int], Array]


@dataclass(frozen=True, eq=False)
class Rollout:
    """How one episode went. Where the simulator failed there is an `error`, and neither score nor success."""

    seed: int
    score: float | None
    success: bool | None
    steps: int
    error: str | None
    actions: npt.NDArray[np.float64]  # (steps, action_dim), as executed


def rollout(
    task_factory: Callable[[], Task],
    act: Act,
    seeds: Sequence[int],
    *,
    n_obs_steps: int,
    n_action_steps: int,
    on_step: Callable[[Sequence[Task]], None] | None = None,
    watchers: Mapping[int, Watcher] | None = None,
) -> tuple[Rollout, ...]:
    """Run one episode for each seed, all in one batch of fixed size, and return their records in the same order.

    Episodes that are over stay in the batch as padding, so the size never changes. An episode whose simulator raises, or
    whose action is not finite, is recorded as failed and the others go on; an error in `act` itself ends the call.

    Args:
        task_factory: Makes one simulator; it is called once for each seed.
        act: Maps the last observations of all episodes, and the index of the chunk, to actions.
        seeds: Those of the episodes.
        n_obs_steps: How many observations `act` sees of each episode; the first one is repeated at the start.
        n_action_steps: How many actions `act` gives at a time; all of them are executed.
        on_step: Sees the simulators after the start and after every step, for videos.
        watchers: By seed, told what is seen, planned and done in that episode; a tick is an executed action.
    """
    if n_obs_steps < 1 or n_action_steps < 1:
        raise TaskError(f"a rollout needs at least 1 step of each, got {n_obs_steps=} and {n_action_steps=}")
    shown, watched = on_step or (lambda tasks: None), watchers or {}
    with episodes_of(task_factory, seeds, n_obs_steps) as episodes:
        tasks = [episode.task for episode in episodes]
        for episode in episodes:
            episode.reset()
        shown(tasks)
        chunk = 0
        while not all(episode.over for episode in episodes):
            actions = np.asarray(act(stacked([stacked(episode.history) for episode in episodes]), chunk))
            expected = (len(episodes), n_action_steps, tasks[0].spec.action_dim)
            if actions.shape != expected:
                raise TaskError(f"the policy's actions have shape {actions.shape}, task and rollout need {expected}")
            for episode, planned in zip(episodes, actions, strict=True):
                if episode.seed in watched and not episode.over:
                    watched[episode.seed].planned(len(episode.actions), len(episode.actions), planned, {})
            for moment in range(n_action_steps):
                for episode, action in zip(episodes, actions[:, moment], strict=True):
                    if episode.seed in watched and not episode.over:
                        watched[episode.seed].observed(len(episode.actions), episode.history[-1])
                        watched[episode.seed].acted(len(episode.actions), Due(action))
                    episode.step(action)
                shown(tasks)
            chunk += 1
        return tuple(episode.record() for episode in episodes)


@contextmanager
def episodes_of(
    task_factory: Callable[[], Task], seeds: Sequence[int], n_obs_steps: int
) -> Iterator[Sequence[Episode]]:
    """A simulator for each seed, closed in the end; no episode has begun."""
    if len(seeds) == 0:
        raise TaskError("a rollout needs at least one seed, got none")
    episodes: list[Episode] = []
    try:
        for seed in seeds:  # one by one, so that all are closed even if making one fails
            episodes.append(Episode(seed, task_factory(), n_obs_steps))
        yield episodes
    finally:
        for episode in episodes:
            with suppress(Exception):  # an error while closing does not cost the results
                episode.task.close()


@dataclass(eq=False)
class Episode:
    """A simulator, what was seen of it last, and what was done in it."""

    seed: int
    task: Task
    n_obs_steps: int
    history: list[Tree] = field(default_factory=list)
    actions: list[Array] = field(default_factory=list)
    error: str | None = None

    def reset(self) -> None:
        spec = self.task.spec
        self.history = [_blank(spec)] * self.n_obs_steps  # what stays if the simulator does not even start
        with self._caught():
            self.history = [checked_observation(self.task.reset(self.seed), spec)] * self.n_obs_steps

    @property
    def over(self) -> bool:
        if self.error is None:
            with self._caught():
                return self.task.done
        return True

    def step(self, action: Array) -> None:
        if self.over:
            return
        if not np.isfinite(action).all():
            self.error = f"the policy's action is not finite at step {len(self.actions)}: {action.tolist()}"
            return
        with self._caught():
            self.task.step(action)
            self.actions.append(np.array(action, dtype=np.float64))
            self.history = [*self.history[1:], checked_observation(self.task.observe(), self.task.spec)]

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """Turns an exception of the simulator into the episode's error; Ctrl-C is none."""
        try:
            yield
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def record(self) -> Rollout:
        shape = (len(self.actions), self.task.spec.action_dim)
        actions = np.array(self.actions, dtype=np.float64).reshape(shape)
        actions.flags.writeable = False
        score = success = None
        if self.error is None:
            with self._caught():
                score, success = self.task.score, self.task.success
        return Rollout(self.seed, score, success, len(self.actions), self.error, actions)


def _blank(spec: TaskSpec) -> Tree:
    blank = {
        name: np.zeros(shape, dtype=np.uint8 if name in spec.cameras else np.float32)
        for name, shape in spec.shapes.items()
    }
    return blank["obs"] if spec.inputs is None else blank


def checked_observation(observation: Any, spec: TaskSpec) -> Tree:
    """A copy of the observation in float32, or in bytes where it is a camera's. One that is not finite, or not as the spec
    says, fails its own episode here, before it reaches the policy, which would fail all episodes of the batch.

    Args:
        observation: As the simulator gives it.
        spec: The task's facts.
    """
    if spec.inputs is None:
        return _finite(observation)
    given = {name: np.asarray(observation[name]) for name in spec.shapes}
    for name, array in given.items():
        if array.shape != tuple(spec.shapes[name]) or (name in spec.cameras and array.dtype != np.uint8):
            kind = "uint8" if name in spec.cameras else "float32"
            raise TaskError(
                f"the simulator's {name!r} is {array.dtype} of {array.shape}, expected {kind} of {spec.shapes[name]}"
            )
    return {name: array.copy() if name in spec.cameras else _finite(array) for name, array in given.items()}


def _finite(array: Array) -> npt.NDArray[np.float32]:
    if not np.isfinite(array).all():
        raise TaskError("the simulator's observation holds NaN or infinity")
    return np.array(array, dtype=np.float32)  # a copy: a simulator may observe into the same array every time
