"""What training must know of a family; the rest of a run is the same for all. Knows no family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from blockcache_lab.training.data import Demonstrations
from blockcache_lab.training.errors import TrainingError
from blockcache_lab.training.windows import Windows

if TYPE_CHECKING:
    from blockcache.tasks import TaskSpec
    from blockcache_lab.training.config import TrainConfig


class Recipe(ABC):
    """How policies of one family are trained.

    horizon, n_obs_steps: of a policy, where nothing else is asked for.
    objectives: what the denoiser may learn, by name, the default first; None where a family has no choice.
    """

    horizon: int
    n_obs_steps: int
    objectives: tuple[str | None, ...] = (None,)

    def check(self, settings: TrainConfig) -> None:
        """Refuse settings that the family does not have, and tasks whose observations it cannot take."""
        spec, known = settings.spec, [name for name in self.objectives if name is not None]
        if settings.objective not in self.objectives:
            expected = f"one of {', '.join(known)}" if known else "none: there is no choice"
            raise TrainingError(
                f"the objective of family {settings.family} must be {expected}; got {settings.objective!r}"
            )
        if settings.trunk is not None and not spec.cameras:
            raise TrainingError(
                f"task {spec.name!r} has no cameras, so there is no trunk to set; got {settings.trunk!r}"
            )
        self.check_task(spec)

    @abstractmethod
    def check_task(self, spec: TaskSpec) -> None:
        """Refuse a task whose observations are none for the family."""

    @abstractmethod
    def config(self, settings: TrainConfig, training: dict[str, Any] | None) -> Any:
        """The config of the policy that a run makes, with `training` as its record."""

    @abstractmethod
    def begin(self, config: Any) -> Any:
        """A policy with the weights that training begins with, by torch's global random numbers."""

    @abstractmethod
    def fit(self, policy: Any, demos: Demonstrations, episodes: list[tuple[int, int]]) -> None:
        """Fit what normalises, to what was seen and done in some episodes."""

    @abstractmethod
    def windows(self, policy: Any, demos: Demonstrations, episodes: list[tuple[int, int]]) -> Windows:
        """All windows of some episodes."""

    @abstractmethod
    def learnt(self, policy: Any) -> dict[str, Tensor]:
        """The parameters that training changes, by name, each once."""

    @abstractmethod
    def predict(self, policy: Any, noisy: Tensor, t: Tensor, seen: Any) -> Tensor:
        """The denoiser's output for noisy actions (B, T, A) at times (B,) under what `Windows.seen` gives."""
