"""The settings of a training run, checked on creation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from blockcache.errors import BlockcacheError
from blockcache.models.dpt import DPTConfig
from blockcache.models.dpt.encoder_config import EncoderConfig, Input
from blockcache.samplers import DDPM
from blockcache.tasks import TaskSpec, task_spec


class TrainingError(BlockcacheError):
    """A training run that cannot be started, or gone on with, as asked."""


@dataclass(frozen=True)
class TrainConfig:
    """What decides the outcome of a run, together with the data. The defaults are the paper's size.

    `trunk` is the width of the cameras' networks, for tasks with cameras: 64, ResNet18's, where nothing else is said.
    """

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
    trunk: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 1), ("warmup", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TrainingError(
                    f"training setting {name} must be a whole number of at least {least}, got {value!r}"
                )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise TrainingError(f"training setting lr must be a positive number, got {self.lr!r}")
        if self.trunk is not None and not self.spec.cameras:
            raise TrainingError(f"task {self.task!r} has no cameras, so there is no trunk to set; got {self.trunk!r}")
        self.policy_config()  # refuses widths and horizons that make no policy

    @property
    def spec(self) -> TaskSpec:
        return task_spec(self.task)

    def policy_config(self, training: dict[str, Any] | None = None) -> DPTConfig:
        """The config of the policy that this run makes, with `training` as its record."""
        encoder = self._encoder()
        return DPTConfig(
            obs_dim=self.spec.obs_dim if encoder is None else encoder.size,
            action_dim=self.spec.action_dim,
            horizon=self.horizon,
            n_obs_steps=self.n_obs_steps,
            n_action_steps=self.n_action_steps,
            n_layer=self.layers,
            n_head=self.heads,
            n_emb=self.width,
            sampler=DDPM(),
            encoder=encoder,
            task=self.task,
            weights="ema",
            training=training,
        )

    def _encoder(self) -> EncoderConfig | None:
        """Cropped as in the public recipe, which leaves four fifths of a side for crops at random to move in."""
        spec = self.spec
        if spec.inputs is None:
            return None
        sides = [min(spec.inputs[name][1:]) for name in spec.cameras]
        crop = 4 * min(sides) // 5
        return EncoderConfig(
            tuple(Input(name, tuple(shape)) for name, shape in spec.inputs.items()),
            (crop, crop),
            width=64 if self.trunk is None else self.trunk,
        )

    def to_dict(self) -> dict[str, Any]:
        """What tells runs apart."""
        return {name: value for name, value in asdict(self).items() if name != "trunk" or value is not None}
