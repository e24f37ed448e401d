"""How the adaLN DiT is trained: on noise, or on the velocity of a flow, from rows of numbers that are normalised.

What begins as zero is as in LeRobot's `multi_task_dit`. Cameras and language are not trained here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from blockcache.models.dit.policy import DiTConfig, DiTPolicy
from blockcache.samplers import DDPM, Euler, SamplerConfig
from blockcache_lab.training.data import TrainingError
from blockcache_lab.training.recipes.base import Recipe

if TYPE_CHECKING:
    from blockcache.tasks import TaskSpec
    from blockcache_lab.training.config import TrainConfig

_SAMPLERS: dict[str | None, SamplerConfig] = {"ddpm": DDPM(), "flow": Euler(num_inference_steps=10)}


class DiTRecipe(Recipe):
    horizon = 16
    n_obs_steps = 2
    objectives = tuple(_SAMPLERS)
    row = "observation.state"  # LeRobot's name for it

    def check_task(self, spec: TaskSpec) -> None:
        if spec.inputs is not None:
            raise TrainingError(
                f"a dit policy is trained on one row of numbers; task {spec.name!r} shows {', '.join(spec.inputs)}"
            )

    def config(self, settings: TrainConfig, training: dict[str, Any] | None) -> DiTConfig:
        return DiTConfig(
            state={self.row: settings.spec.obs_dim},
            action_dim=settings.spec.action_dim,
            horizon=settings.horizon,
            n_obs_steps=settings.n_obs_steps,
            n_action_steps=settings.n_action_steps,
            num_layers=settings.layers,
            num_heads=settings.heads,
            hidden_dim=settings.width,
            timestep_embed_dim=max(4, settings.width // 4 * 2),  # half the width, as LeRobot's
            sampler=_SAMPLERS[settings.objective],
            task=settings.task,
            weights="ema",
            training=training,
        )

    def begin(self, config: DiTConfig, start: str = "public") -> DiTPolicy:
        """All gates are closed: every block begins as the identity."""
        policy = DiTPolicy(config)
        for block in policy.noise_predictor.transformer_blocks:
            modulation = block.get_submodule("adaLN_modulation.1")
            assert isinstance(modulation, nn.Linear)
            nn.init.zeros_(modulation.weight)
            nn.init.zeros_(modulation.bias)
        return policy

    def denoiser(self, policy: DiTPolicy) -> nn.Module:
        return policy.noise_predictor
