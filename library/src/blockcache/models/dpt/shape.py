"""A DP-T policy with random weights, by its sizes: speed does not depend on the weights."""

from __future__ import annotations

from dataclasses import dataclass

from blockcache.errors import PolicyError
from blockcache.models.dpt.encoder import EncoderConfig, Input
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.samplers import SamplerConfig

FEATURES = 64  # of a camera


@dataclass(frozen=True)
class Shape:
    """A policy to measure. The defaults are the paper's: 15.74 GFLOP in full.

    Of the `obs_dim` numbers 64 come from each of the `cameras`, of 96 x 96 pixels as in Push-T, the others as they are.
    """

    width: int = 256
    layers: int = 8
    heads: int = 4
    horizon: int = 10
    n_obs_steps: int = 2
    obs_dim: int = 66
    action_dim: int = 2
    n_action_steps: int = 8
    sampler: str = "ddpm"
    steps: int = 100
    batch: int = 1
    cameras: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cameras * FEATURES <= self.obs_dim:
            raise PolicyError(
                f"each camera gives {FEATURES} of an observation's {self.obs_dim} numbers; got {self.cameras} cameras"
            )

    @property
    def encoder(self) -> EncoderConfig | None:
        numbers = self.obs_dim - self.cameras * FEATURES
        inputs = [Input(f"camera{index}" if index else "image", (3, 96, 96)) for index in range(self.cameras)]
        inputs += [Input("numbers", (numbers,))] if numbers else []
        return EncoderConfig(tuple(inputs), (76, 76), features=FEATURES) if self.cameras else None

    def policy(self) -> DiffusionTransformerPolicy:
        """Random weights, always the same ones."""
        return DiffusionTransformerPolicy.random(
            DPTConfig(
                obs_dim=self.obs_dim,
                action_dim=self.action_dim,
                horizon=self.horizon,
                n_obs_steps=self.n_obs_steps,
                n_action_steps=self.n_action_steps,
                n_layer=self.layers,
                n_head=self.heads,
                n_emb=self.width,
                encoder=self.encoder,
                sampler=SamplerConfig.from_dict({"type": self.sampler, "num_inference_steps": self.steps}),
            )
        )
