"""The settings of a training run, checked on creation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from blockcache.errors import BlockcacheError
from blockcache.models.dpt import DPTConfig
from blockcache.samplers import DDPM
from blockcache.tasks import TaskSpec, task_spec


class TrainingError(BlockcacheError):
    """A training run that cannot be started, or gone on with, as asked."""


@dataclass(frozen=True)
class TrainConfig:
    """What decides the outcome of a run, together with the data. The defaults are the paper's size."""

    task: str
    width: int = 256
    layers: int = 8
    heads: int = 4
    horizon: int = 10
    n_obs_steps: int = 2
    n_action_steps: int = 8
    epochs: int = 60
    batch: int = 128
    lr: float = 6e-4
    warmup: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 1), ("warmup", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TrainingError(
                    f"training setting {name} must be a whole number of at least {least}, got {value!r}"
                )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise TrainingError(f"training setting lr must be a positive number, got {self.lr!r}")
        self.policy_config()  # refuses widths and horizons that make no policy

    @property
    def spec(self) -> TaskSpec:
        return task_spec(self.task)

    def policy_config(self, training: dict[str, Any] | None = None) -> DPTConfig:
        """The config of the policy that this run makes, with `training` as its record."""
        return DPTConfig(
            obs_dim=self.spec.obs_dim,
            action_dim=self.spec.action_dim,
            horizon=self.horizon,
            n_obs_steps=self.n_obs_steps,
            n_action_steps=self.n_action_steps,
            n_layer=self.layers,
            n_head=self.heads,
            n_emb=self.width,
            sampler=DDPM(),
            task=self.task,
            weights="ema",
            training=training,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
