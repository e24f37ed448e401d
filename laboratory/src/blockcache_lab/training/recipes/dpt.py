"""How DP-T is trained: on noise, with normalised observations, or with frames that an encoder learns to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from blockcache.models.dpt.encoder import EncoderConfig, Input
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.samplers import DDPM
from blockcache_lab.training.data import Demonstrations, window_indices
from blockcache_lab.training.errors import TrainingError
from blockcache_lab.training.recipes.base import Recipe
from blockcache_lab.training.windows import EncodedWindows, Windows, windowed

if TYPE_CHECKING:
    from blockcache.tasks import TaskSpec
    from blockcache_lab.training.config import TrainConfig


class DPTRecipe(Recipe):
    horizon = 10
    n_obs_steps = 2

    def check_task(self, spec: TaskSpec) -> None:
        odd = [name for name, shape in spec.shapes.items() if len(shape) != (3 if name in spec.cameras else 1)]
        if odd or (spec.inputs is not None and not spec.cameras):
            shapes = ", ".join(f"{name} {shape}" for name, shape in spec.shapes.items())
            raise TrainingError(
                f"a dpt policy sees one row of numbers, or cameras and rows of numbers; task {spec.name!r} shows {shapes}"
            )

    def config(self, settings: TrainConfig, training: dict[str, Any] | None) -> DPTConfig:
        encoder = _encoder(settings)
        return DPTConfig(
            obs_dim=settings.spec.obs_dim if encoder is None else encoder.size,
            action_dim=settings.spec.action_dim,
            horizon=settings.horizon,
            n_obs_steps=settings.n_obs_steps,
            n_action_steps=settings.n_action_steps,
            n_layer=settings.layers,
            n_head=settings.heads,
            n_emb=settings.width,
            sampler=DDPM(),
            encoder=encoder,
            task=settings.task,
            weights="ema",
            training=training,
        )

    def begin(self, config: DPTConfig) -> DiffusionTransformerPolicy:
        return DiffusionTransformerPolicy(config)

    def fit(self, policy: DiffusionTransformerPolicy, demos: Demonstrations, episodes: list[tuple[int, int]]) -> None:
        """Frames have their range from 0 to 1 already."""
        steps = np.concatenate([np.arange(*episode) for episode in episodes])
        seen = demos.obs if isinstance(demos.obs, Mapping) else {"obs": demos.obs}
        for name, values in seen.items():
            if name not in policy.config.cameras:
                policy.normalizer.field(name).fit(torch.from_numpy(values[steps]))
        policy.normalizer.action.fit(torch.from_numpy(demos.action[steps]))

    def windows(
        self, policy: DiffusionTransformerPolicy, demos: Demonstrations, episodes: list[tuple[int, int]]
    ) -> Windows:
        """Numbers are normalised once."""
        config = policy.config
        steps = windowed(
            window_indices(episodes, config.horizon, config.n_obs_steps, config.n_action_steps), config.horizon
        )
        action = policy.normalizer.action.normalize(torch.from_numpy(demos.action))[steps]
        places = steps[:, : config.n_obs_steps]
        if not config.cameras:
            return Windows(obs=policy.normalizer.obs.normalize(torch.from_numpy(demos.obs))[places], action=action)
        seen = {name: torch.from_numpy(values) for name, values in demos.obs.items()}
        return EncodedWindows(obs=places, action=action, steps=seen)

    def learnt(self, policy: DiffusionTransformerPolicy) -> dict[str, Tensor]:
        """The denoiser's by their own names, and the encoder's."""
        found: dict[str, Tensor] = dict(policy.model.named_parameters())
        if policy.obs_encoder is not None:
            found |= {f"obs_encoder.{name}": weight for name, weight in policy.obs_encoder.named_parameters()}
        return found

    def predict(self, policy: DiffusionTransformerPolicy, noisy: Tensor, t: Tensor, seen: Tensor) -> Tensor:
        out: Tensor = policy.model(noisy, t, seen)
        return out


def _encoder(settings: TrainConfig) -> EncoderConfig | None:
    """Cropped as in the public recipe, which leaves four fifths of a side for crops at random to move in."""
    spec = settings.spec
    if spec.inputs is None:
        return None
    sides = [min(spec.inputs[name][1:]) for name in spec.cameras]
    crop = 4 * min(sides) // 5
    return EncoderConfig(
        tuple(Input(name, tuple(shape)) for name, shape in spec.inputs.items()),
        (crop, crop),
        width=64 if settings.trunk is None else settings.trunk,
    )
