"""What training must know of a family; the rest of a run is the same for all. Knows no family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from blockcache_lab.training.data import Demonstrations, TrainingError, window_indices
from blockcache_runtime.checks import BYTE

if TYPE_CHECKING:
    from blockcache.tasks import TaskSpec
    from blockcache_lab.training.config import TrainConfig

MOST_VALIDATED = 128
"""Windows with frames that a validation uses: on a CPU all of them would take longer than a tenth of an epoch."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of demonstrations, ready to be indexed.

    action: (N, horizon, A), normalised.
    obs: (N, ...) the conditions of the denoiser or, with `steps`, which of the steps each window observes.
    steps: Everything that was observed by name, step by step, in robot units, where the policy encodes it by weights that
        learn too. Frames stay bytes, each once in memory, until a batch needs them.
    counted: (N, 1, A), 1 where a number of the actions is learnt and 0 where it is none of the robot's; without it all are.
    """

    action: Tensor
    obs: Tensor
    steps: Mapping[str, Tensor] | None = None
    counted: Tensor | None = None

    def __len__(self) -> int:
        return len(self.action)

    def conditions(self, policy: Any, rows: Tensor) -> Any:
        """What the denoiser is conditioned on in some windows."""
        if self.steps is None:
            return self.obs[rows]
        observed = {name: values[self.obs[rows]] for name, values in self.steps.items()}
        return policy.encode(
            {name: value.float() / BYTE if value.dtype == torch.uint8 else value for name, value in observed.items()}
        )

    @torch.no_grad()
    def encoded(self, policy: Any) -> Windows:
        """With the conditions of every window, by an encoder that does not learn: it is asked once."""
        rows = torch.arange(len(self)).chunk(-(-len(self) // MOST_VALIDATED))
        return replace(self, obs=torch.cat([self.conditions(policy, some) for some in rows]), steps=None)

    @property
    def validated(self) -> Tensor:
        """The windows that a validation uses."""
        if all(values.dtype != torch.uint8 for values in (self.steps or {}).values()):
            return torch.arange(len(self))
        return torch.linspace(0, len(self) - 1, min(len(self), MOST_VALIDATED)).round().long()


class Recipe(ABC):
    """How policies of one family are trained.

    horizon, n_obs_steps: of a policy, where nothing else is asked for.
    objectives: what the denoiser may learn, by name, the default first; None where a family has no choice.
    row: the policy's name for an observation that is one row of numbers.
    has_dropout: whether the family's denoiser has layers of it.
    starts: the ways to draw the weights that learning begins with.
    """

    horizon: int
    n_obs_steps: int
    objectives: tuple[str | None, ...] = (None,)
    row = "obs"
    has_dropout = False
    starts: tuple[str, ...] = ("public",)

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
        if (settings.crop is not None or settings.frozen) and not spec.cameras:
            raise TrainingError(f"task {spec.name!r} has no cameras, so there is nothing to crop or to freeze")
        if settings.dropout and not self.has_dropout:
            raise TrainingError(
                f"family {settings.family} has no dropout: it must be 0, got {settings.dropout!r}; dpt has it"
            )
        if settings.start not in self.starts:
            raise TrainingError(
                f"the start of family {settings.family} must be {' or '.join(self.starts)}; got {settings.start!r}"
            )
        self.check_task(spec)

    @abstractmethod
    def check_task(self, spec: TaskSpec) -> None:
        """Refuse a task whose observations the family cannot take."""

    @abstractmethod
    def config(self, settings: TrainConfig, training: dict[str, Any] | None) -> Any:
        """The config of the policy that a run makes, with `training` as its record."""

    @abstractmethod
    def begin(self, config: Any, start: str = "public") -> Any:
        """A policy with the weights that training begins with, by torch's global random numbers."""

    @abstractmethod
    def denoiser(self, policy: Any) -> nn.Module:
        """The module that is called with noisy actions, times and conditions."""

    def observed(self, demos: Demonstrations) -> dict[str, Tensor]:
        """What was observed in each step, by the policy's names."""
        named = demos.obs if isinstance(demos.obs, Mapping) else {self.row: demos.obs}
        return {name: torch.from_numpy(values) for name, values in named.items()}

    def fit(self, policy: Any, demos: Demonstrations, episodes: list[tuple[int, int]]) -> None:
        """Fit the normaliser to some episodes; frames have their range from 0 to 1 already."""
        steps = torch.from_numpy(np.concatenate([np.arange(*episode) for episode in episodes]))
        for name, values in self.observed(demos).items():
            if values.dtype != torch.uint8:
                policy.normalizer.field(name).fit(values[steps])
        policy.normalizer.action.fit(torch.from_numpy(demos.action)[steps])

    def windows(self, policy: Any, demos: Demonstrations, episodes: list[tuple[int, int]]) -> Windows:
        """All windows of some episodes. Conditions that no learning weight makes are encoded once."""
        config, seen = policy.config, self.observed(demos)
        steps = window_steps(episodes, config.horizon, config.n_obs_steps, config.n_action_steps)
        action = policy.normalizer.action.normalize(torch.from_numpy(demos.action))[steps]
        places = steps[:, : config.n_obs_steps]
        if any(values.dtype == torch.uint8 for values in seen.values()):
            return Windows(action, places, seen)
        return Windows(action, policy.encode({name: values[places] for name, values in seen.items()}))

    def learnt(self, policy: Any, frozen: bool = False) -> dict[str, Tensor]:
        """The parameters that training changes, by name, each once; those of a `frozen` encoder are none of them."""
        return dict(self.denoiser(policy).named_parameters())

    def predict(self, policy: Any, noisy: Tensor, t: Tensor, conditions: Any) -> Tensor:
        """The denoiser's output for noisy actions (B, T, A) at times (B,) under what `Windows.conditions` gives."""
        out: Tensor = self.denoiser(policy)(noisy, t, conditions)
        return out


def window_steps(episodes: list[tuple[int, int]], horizon: int, n_obs_steps: int, n_action_steps: int) -> Tensor:
    """The steps of every window, (N, horizon); no window at all is refused."""
    steps = window_indices(episodes, horizon, n_obs_steps, n_action_steps)
    if not len(steps):
        raise TrainingError(f"no episode is long enough for a window of {horizon} steps; take a shorter horizon")
    return torch.from_numpy(steps)
