"""Windows of demonstrations as a training step takes them: clean actions, and what the policy attends to.

Numbers are normalised once. Frames stay bytes, each once in memory, until a batch needs them. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.frames import BYTE
from blockcache.models.dpt import DiffusionTransformerPolicy
from blockcache.training.config import TrainingError
from blockcache.training.data import Demonstrations, window_indices

MOST_LOOKS = 128
"""Windows with frames that a validation looks at: on a CPU all of them would take longer than an epoch's tenth."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Normalised windows, ready to be indexed: obs (N, n_obs, O), action (N, horizon, A)."""

    obs: Tensor
    action: Tensor

    def __len__(self) -> int:
        return len(self.action)

    def seen(self, policy: DiffusionTransformerPolicy, rows: Tensor) -> Tensor:
        """What the denoiser attends to in some windows, (B, n_obs, obs_dim)."""
        return self.obs[rows]

    @property
    def judged(self) -> Tensor:
        """The windows that a validation looks at."""
        return torch.arange(len(self))


@dataclass(frozen=True, eq=False)
class CameraWindows(Windows):
    """With frames: `steps` holds everything that was seen by name, step by step, in robot units; `obs` (N, n_obs) says which
    steps a window sees."""

    steps: Mapping[str, Tensor]

    def seen(self, policy: DiffusionTransformerPolicy, rows: Tensor) -> Tensor:
        """Encoded by the policy that is asked about: its encoder learns too."""
        places = self.obs[rows]
        observed = {name: values[places] for name, values in self.steps.items()}
        return policy.encode(
            {name: value.float() / BYTE if value.dtype == torch.uint8 else value for name, value in observed.items()}
        )

    @property
    def judged(self) -> Tensor:
        return torch.linspace(0, len(self) - 1, min(len(self), MOST_LOOKS)).round().long()


def fit_normalizer(policy: DiffusionTransformerPolicy, demos: Demonstrations, episodes: list[tuple[int, int]]) -> None:
    """To what was seen and done in some episodes; frames have their range from 0 to 1 already."""
    steps = np.concatenate([np.arange(*episode) for episode in episodes])
    for name, values in _numbers(policy, demos).items():
        policy.normalizer.field(name).fit(torch.from_numpy(values[steps]))
    policy.normalizer.action.fit(torch.from_numpy(demos.action[steps]))


def windows_of(policy: DiffusionTransformerPolicy, demos: Demonstrations, episodes: list[tuple[int, int]]) -> Windows:
    """All windows of some episodes."""
    settings = policy.config
    steps = torch.from_numpy(window_indices(episodes, settings.horizon, settings.n_obs_steps, settings.n_action_steps))
    if not len(steps):
        raise TrainingError(
            f"no episode is long enough for a window of {settings.horizon} steps; take a shorter horizon"
        )
    action = policy.normalizer.action.normalize(torch.from_numpy(demos.action))[steps]
    places = steps[:, : settings.n_obs_steps]
    if not settings.cameras:
        return Windows(policy.normalizer.obs.normalize(torch.from_numpy(demos.obs))[places], action)
    return CameraWindows(places, action, {name: torch.from_numpy(values) for name, values in demos.obs.items()})


def _numbers(policy: DiffusionTransformerPolicy, demos: Demonstrations) -> dict[str, Any]:
    seen = demos.obs if isinstance(demos.obs, Mapping) else {"obs": demos.obs}
    return {name: values for name, values in seen.items() if name not in policy.config.cameras}
