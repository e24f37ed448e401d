"""Windows of demonstrations as a training step takes them: clean actions, and what the denoiser is conditioned on.

Frames stay bytes, each once in memory, until a batch needs them. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from blockcache_lab.training.errors import TrainingError
from blockcache_runtime.checks import BYTE

MOST_LOOKS = 128
"""Windows with frames that a validation looks at: on a CPU all of them would take longer than an epoch's tenth."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Windows:
    """Normalised windows, ready to be indexed: obs (N, n_obs, O), action (N, horizon, A).

    counted: (N, 1, A), 1 where a number of the actions is learnt and 0 where it is none of the robot's; without it all are.
    """

    obs: Tensor
    action: Tensor
    counted: Tensor | None = None

    def __len__(self) -> int:
        return len(self.action)

    def seen(self, policy: Any, rows: Tensor) -> Any:
        """What the denoiser is conditioned on in some windows, (B, n_obs, O) here."""
        return self.obs[rows]

    @property
    def judged(self) -> Tensor:
        """The windows that a validation looks at."""
        return torch.arange(len(self))


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodedWindows(Windows):
    """Where the policy encodes what it sees, by weights that learn too: `steps` holds everything that was seen by name,
    step by step, in robot units; `obs` (N, ...) says which steps a window sees."""

    steps: Mapping[str, Tensor]

    def seen(self, policy: Any, rows: Tensor) -> Any:
        """As the policy that is asked about encodes it."""
        places = self.obs[rows]
        observed = {name: values[places] for name, values in self.steps.items()}
        return policy.encode(
            {name: value.float() / BYTE if value.dtype == torch.uint8 else value for name, value in observed.items()}
        )

    @property
    def judged(self) -> Tensor:
        if all(values.dtype != torch.uint8 for values in self.steps.values()):
            return super().judged
        return torch.linspace(0, len(self) - 1, min(len(self), MOST_LOOKS)).round().long()


def windowed(steps: npt.NDArray[Any], horizon: int) -> Tensor:
    """The steps of every window as a tensor; no window at all is refused."""
    if not len(steps):
        raise TrainingError(f"no episode is long enough for a window of {horizon} steps; take a shorter horizon")
    return torch.from_numpy(steps)
