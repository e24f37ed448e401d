"""What a task is, and where tasks are found by name. Knows nothing of policies, engines or schedules.

A `TaskSpec` can be read without the task's simulator; only `make_task` imports it. Another package brings a task by
registering a `TaskEntry` under the entry point group `blockcache.tasks`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError

Array: TypeAlias = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TaskSpec:
    """The facts of a task: widths, length of an episode, and what counts as success."""

    name: str
    obs_dim: int
    action_dim: int
    max_steps: int
    success: str  # one phrase, for tables
    extra: str  # what to put in pip install "blockcache[...]"
    first_test_seed: int = 100_000


class Task(Protocol):
    """One simulator with one episode in it. The same seed and actions give the same episode."""

    @property
    def spec(self) -> TaskSpec: ...

    def reset(self, seed: int) -> Array:
        """Start an episode; its first observation, (obs_dim,) float32."""

    def observe(self) -> Array:
        """The observation as it is now, (obs_dim,) float32."""

    def step(self, action: Array) -> None:
        """Take one action, (action_dim,) in the robot's units."""

    @property
    def score(self) -> float:
        """How well the episode went so far, from 0 to 1; it never falls."""

    @property
    def success(self) -> bool: ...

    @property
    def done(self) -> bool:
        """Nothing that comes can change the score any more, or the steps are used up."""

    def render(self) -> npt.NDArray[np.uint8]:
        """A picture of the scene, (height, width, 3)."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class TaskEntry:
    """A task that can be found by name, and the "module:factory" of its simulator, imported when the task is made."""

    spec: TaskSpec
    factory: str  # of a callable that takes the spec

    def make(self) -> Task:
        module, name = self.factory.split(":")
        make: Callable[[TaskSpec], Task] = getattr(importlib.import_module(module), name)
        return make(self.spec)


def _metaworld(name: str) -> TaskEntry:
    spec = TaskSpec(name, obs_dim=39, action_dim=4, max_steps=300, success="the simulator's flag", extra="metaworld")
    return TaskEntry(spec, "blockcache.tasks.metaworld:MetaWorld")


_OURS = (
    TaskEntry(
        TaskSpec("pusht", obs_dim=20, action_dim=2, max_steps=300, success="coverage >= 0.95", extra="pusht"),
        "blockcache.tasks.pusht:PushT",
    ),
    _metaworld("metaworld-assembly"),
    _metaworld("metaworld-peg-insert-side"),
    _metaworld("metaworld-pick-place"),
)


def task_names() -> tuple[str, ...]:
    return tuple(sorted(_tasks()))


def task_spec(name: str) -> TaskSpec:
    """The facts of a task, without its simulator."""
    return _find(name).spec


def make_task(name: str) -> Task:
    """A fresh simulator of the task; if it is not installed, the error names the extra that brings it."""
    entry = _find(name)
    try:
        return entry.make()
    except ImportError as error:
        raise TaskError(
            f"the simulator of task {name!r} is not usable ({error}); "
            f'install it with pip install "blockcache[{entry.spec.extra}]"'
        ) from error


def _find(name: str) -> TaskEntry:
    known = _tasks()
    if name not in known:
        raise TaskError(f"unknown task {name!r}; known tasks are {', '.join(sorted(known))}")
    return known[name]


def _tasks() -> dict[str, TaskEntry]:
    """Ours, and those that other packages register."""
    known = {entry.spec.name: entry for entry in _OURS}
    for point in entry_points(group="blockcache.tasks"):
        known.setdefault(point.name, point.load())
    return known
