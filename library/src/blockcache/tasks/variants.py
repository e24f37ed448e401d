"""A task made less forgiving by one suffix of its name: `metaworld-pick-place@steps=60,push=0.5`.

    steps  an episode has at most so many
    push   now and then, for a few steps, this much is added to every action in a direction of its own, in the action's units

Knows nothing of simulators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from blockcache.errors import TaskError

if TYPE_CHECKING:
    from blockcache.tasks.base import Array, Task, TaskSpec, Tree

MARK = "@"
_KINDS: Mapping[str, Any] = {"steps": int, "push": float}
_OFTEN, _LONG = 0.04, 5
"""The chance that a push begins at a step, and how many steps it lasts."""


@dataclass(frozen=True)
class Variant:
    """What is changed of a task."""

    steps: int | None = None
    push: float = 0.0

    def spec(self, spec: TaskSpec, name: str) -> TaskSpec:
        """That of the changed task."""
        if self.steps is not None and self.steps > spec.max_steps:
            raise TaskError(
                f"task {spec.name!r} has {spec.max_steps} steps, which steps={self.steps} would not shorten"
            )
        return replace(spec, name=name, max_steps=self.steps or spec.max_steps)


def split(name: str) -> tuple[str, Variant]:
    """A task's own name, and what is changed of it; a suffix that is none is refused.

    Args:
        name: Such as `pusht` or `pusht@steps=150`.
    """
    own, mark, text = name.partition(MARK)
    if not mark:
        return name, Variant()
    pairs = [item.partition("=")[::2] for item in text.split(",")]
    try:
        found: dict[str, Any] = {key: _KINDS[key](value) for key, value in pairs}
    except (KeyError, ValueError):
        found = {}
    if len(found) < len(pairs) or not all(0 < value < math.inf for value in found.values()):
        raise TaskError(
            f"task {name!r} ends with {text!r}, expected steps=N, push=X or both, each once and above 0; "
            f"write it as in {own}@steps=100,push=0.5"
        )
    return own, Variant(**found)


class Changed:
    """A task under a variant. Pushes depend on the seed and the step alone, so that all methods meet the same ones."""

    def __init__(self, task: Task, variant: Variant, name: str) -> None:
        self._task, self._push = task, variant.push
        self.spec = variant.spec(task.spec, name)
        self._steps, self._pushes = 0, np.zeros((0, task.spec.action_dim))

    def reset(self, seed: int) -> Tree:
        rng, shape = np.random.default_rng(seed), (self.spec.max_steps, self.spec.action_dim)
        begins, directions = rng.random(shape[0]) < _OFTEN, rng.standard_normal(shape)
        self._steps, self._pushes = 0, np.zeros(shape)
        for step in np.flatnonzero(begins):
            self._pushes[step : step + _LONG] = self._push * directions[step] / np.linalg.norm(directions[step])
        return self._task.reset(seed)

    def observe(self) -> Tree:
        return self._task.observe()

    def step(self, action: Array) -> None:
        self._task.step(action + self._pushes[self._steps])
        self._steps += 1

    @property
    def score(self) -> float:
        return self._task.score

    @property
    def success(self) -> bool:
        return self._task.success

    @property
    def done(self) -> bool:
        return self._task.done or self._steps >= self.spec.max_steps

    def render(self) -> Any:
        return self._task.render()

    def close(self) -> None:
        self._task.close()
