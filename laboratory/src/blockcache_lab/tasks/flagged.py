"""What tasks share whose only score is their simulator's own flag of success: 1 once it was set, 0 before."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from blockcache.errors import TaskError
from blockcache.tasks.base import Array, TaskSpec


class Flagged:
    """Counts the steps of an episode and keeps its flag; the simulator is the subclass's."""

    simulator: ClassVar[str]  # its name, for messages

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self._steps = 0
        self._success: bool | None = None  # None before the first reset

    def _begin(self) -> None:
        self._steps, self._success = 0, False

    def _checked(self, action: Any) -> Array:
        """An action that this episode can take, as float64."""
        if self._success is None:
            raise TaskError(f"the {self.simulator} episode has not begun; call reset first")
        wanted = np.asarray(action, dtype=np.float64)
        if wanted.shape != (self.spec.action_dim,) or not np.isfinite(wanted).all():
            raise TaskError(f"a {self.simulator} action is {self.spec.action_dim} finite numbers, got {action!r}")
        return wanted

    def _stepped(self, flag: Any) -> None:
        self._steps += 1
        self._success = self.success or bool(flag)

    @property
    def score(self) -> float:
        return float(self.success)

    @property
    def success(self) -> bool:
        return bool(self._success)

    @property
    def done(self) -> bool:
        return self.success or self._steps >= self.spec.max_steps
