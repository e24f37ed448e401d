"""What a task is, and where tasks are found by name. Knows nothing of policies, engines or schedules.

A `TaskSpec` can be read without the task's simulator; only `make_task` imports it. Another package brings a task by
registering a `TaskEntry` under the entry point group `blockcache.tasks`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError, entry_failure
from blockcache.extras import how_to_install
from blockcache.tasks.variants import Changed, Variant, split

Array: TypeAlias = npt.NDArray[np.floating[Any]]
Tree: TypeAlias = Any
"""One observation: an array, or a mapping of arrays by name."""
Expert: TypeAlias = Callable[[Tree], Array]  # observation -> action, within the task's limits


@dataclass(frozen=True)
class TaskSpec:
    """The facts of a task: widths, length of an episode, and what counts as success.

    An observation is one array of `obs_dim` numbers, or a mapping: then `obs_dim` is 0, `inputs` gives its shapes by name,
    and `cameras` says which of them are frames, (channels, height, width) uint8. `version` is another one once what is
    observed, or what an action means, has changed: demonstrations of an earlier one no longer fit.
    """

    name: str
    obs_dim: int
    action_dim: int
    max_steps: int
    success: str  # one phrase, for tables
    extra: str  # of the distribution, which brings the simulator
    first_test_seed: int = 100_000
    inputs: Mapping[str, tuple[int, ...]] | None = None
    cameras: tuple[str, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version < 1:
            raise TaskError(f"the version of task {self.name!r} must be a whole number from 1 on, got {self.version!r}")
        if (self.obs_dim > 0) == bool(self.inputs) or any(name not in (self.inputs or ()) for name in self.cameras):
            raise TaskError(
                f"task {self.name!r} must say its obs_dim, or be 0 there and name its inputs, cameras among them; got "
                f"obs_dim={self.obs_dim}, inputs={self.inputs}, cameras={self.cameras}"
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of one observation, by name; one array is called "obs"."""
        return self.inputs or {"obs": (self.obs_dim,)}

    def describe(self) -> dict[str, Any]:
        """All of it in JSON types; what a task does not have, and a version of 1, are left out."""
        facts = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        return {name: value for name, value in facts.items() if (name, value) != ("version", 1)}


class Task(Protocol):
    """One simulator with one episode in it. The same seed and actions give the same episode."""

    @property
    def spec(self) -> TaskSpec: ...

    def reset(self, seed: int) -> Tree:
        """Start an episode; its first observation, (obs_dim,) float32, or a mapping of arrays as the spec's `inputs`."""

    def observe(self) -> Tree:
        """The observation as it is now."""

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
    """A task that can be found by name. Factories are "module:name", so that the simulator is imported only when needed.

    Args:
        spec: The facts.
        factory: Makes a Task from the spec.
        expert: Makes an Expert from a Task in which an episode has begun, where the simulator has one.
        distribution: The package whose extra `spec.extra` brings the simulator.
    """

    spec: TaskSpec
    factory: str
    expert: str | None = None
    distribution: str = "blockcache"


_PUSHT = TaskEntry(
    TaskSpec("pusht", obs_dim=20, action_dim=2, max_steps=300, success="coverage >= 0.95", extra="pusht"),
    "blockcache.tasks.pusht:PushT",
)


def task_names() -> tuple[str, ...]:
    """Push-T, and what other packages bring."""
    return tuple(sorted({_PUSHT.spec.name, *(point.name for point in _registered())}))


def task_spec(name: str) -> TaskSpec:
    """The facts of a task, without its simulator.

    Args:
        name: One of `task_names()`, perhaps with a suffix that makes it harder (`tasks.variants`).
    """
    own, variant = split(name)
    return variant.spec(_find(own).spec, name)


def make_task(name: str) -> Task:
    """A fresh simulator of the task; if it is not installed, the error names the extra that brings it.

    Args:
        name: As `task_spec` takes it.
    """
    own, variant = split(name)
    entry = _find(own)
    task: Task = _factory(entry, entry.factory)(entry.spec)
    return task if variant == Variant() else Changed(task, variant, name)


def expert_factory(name: str) -> Callable[[Task], Expert]:
    """What makes the simulator's own expert, given a Task whose episode has begun; without one the error says so.

    Args:
        name: The task's name.
    """
    entry = _find(name)
    if entry.expert is None:
        raise TaskError(f"task {name!r} has no expert of its own; its demonstrations must come from elsewhere")
    return _factory(entry, entry.expert)


def _factory(entry: TaskEntry, factory: str) -> Callable[..., Any]:
    def make(argument: Any) -> Any:
        module, name = factory.split(":")
        try:
            return getattr(importlib.import_module(module), name)(argument)
        except ImportError as error:
            raise TaskError(
                f"the simulator of task {entry.spec.name!r} is not usable ({error}); "
                f"it comes with {how_to_install(entry.distribution, entry.spec.extra)}"
            ) from error

    return make


def _find(name: str) -> TaskEntry:
    """Push-T, or a task that another package registers; only that one is loaded, so that others cannot do harm."""
    points = [point for point in _registered() if point.name == name]
    known = len(points) + (name == _PUSHT.spec.name)
    if not known:
        raise TaskError(f"unknown task {name!r}; known tasks are {', '.join(task_names())}")
    if known > 1:
        raise TaskError(f"the task {name!r} is registered more than once: by {', '.join(p.value for p in points)}")
    return _load(points[0]) if points else _PUSHT


def _load(point: EntryPoint) -> TaskEntry:
    try:
        entry = point.load()
    except Exception as error:
        raise TaskError(entry_failure("task", point, error)) from error
    if not isinstance(entry, TaskEntry) or entry.spec.name != point.name:
        raise TaskError(f"{point.value} is registered as task {point.name!r}, but is not a TaskEntry of that name")
    return entry


def _registered() -> Iterable[EntryPoint]:
    return entry_points(group="blockcache.tasks")
