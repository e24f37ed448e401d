"""The DP-T policy: normaliser, encoder (for cameras), denoiser and sampler behind one `predict_action`; and its sizes alone,
with random weights, to measure speed.

Knows nothing of caching or tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from blockcache.errors import PolicyError
from blockcache.files import Limit
from blockcache.models.dpt.denoiser import DiffusionTransformer
from blockcache.models.dpt.encoder import EncoderConfig, Input, ObservationEncoder
from blockcache.models.normalizer import LinearNormalizer
from blockcache.models.own_policy import Depth, OwnPolicy, PolicyConfig, Size
from blockcache.models.sampling import make_scheduler
from blockcache.observations.tensors import check_observation, check_tree
from blockcache.samplers import SamplerConfig

FAMILY = "dp-t"
_NETWORK = (
    "horizon", "n_obs_steps", "n_layer", "n_head", "n_emb", "p_drop_emb", "p_drop_attn", "causal_attn", "time_as_cond",
    "n_cond_layers",
)  # fmt: skip
"""Settings that the denoiser has too."""
Dropout: TypeAlias = Annotated[float, Limit(0, 0.999)]


@dataclass(frozen=True, kw_only=True)
class DPTConfig(PolicyConfig):
    """The sizes of a policy, names as in the public code.

    With an `encoder` the policy looks through cameras, and `obs_dim` is the size of what the encoder makes of a moment.
    """

    FAMILY: ClassVar[str] = FAMILY
    obs_dim: Size
    n_layer: Depth = 8
    n_head: Size = 4
    n_emb: Size = 256
    n_cond_layers: Annotated[int, Limit(0, 1_000)] = 0
    causal_attn: bool = True
    time_as_cond: bool = True
    obs_as_cond: bool = True
    p_drop_emb: Dropout = 0.0
    p_drop_attn: Dropout = 0.0
    encoder: EncoderConfig | None = None
    family: str = FAMILY

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_emb % self.n_head or self.n_emb % 2 or self.n_emb < 4:
            raise PolicyError(f"n_emb must be even, 4 or more, divisible by n_head, got {self.n_emb} and {self.n_head}")
        if self.obs_as_cond and not self.time_as_cond:
            raise PolicyError("obs_as_cond needs time_as_cond: the encoder-only form in-paints its observations")
        if self.encoder is None:
            return
        if not self.obs_as_cond:
            raise PolicyError("an encoder needs obs_as_cond: features cannot be in-painted")
        if self.encoder.size != self.obs_dim:
            raise PolicyError(
                f"policy setting obs_dim is {self.obs_dim}, expected {self.encoder.size}: what the encoder makes of a moment"
            )

    @property
    def sample_dim(self) -> int:
        """Numbers per token: the action, and the observation too where it is in-painted."""
        return self.action_dim if self.obs_as_cond else self.action_dim + self.obs_dim

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        if self.encoder is None:
            return {"obs": (self.n_obs_steps, self.obs_dim)}
        return {item.name: (self.n_obs_steps, *item.shape) for item in self.encoder.inputs}

    @property
    def cameras(self) -> tuple[str, ...]:
        return () if self.encoder is None else tuple(item.name for item in self.encoder.cameras)

    @property
    def least_weights(self) -> tuple[int, int, int]:
        layers = self.n_layer + self.n_cond_layers
        least = layers * 12 * self.n_emb**2 + self.n_emb * (self.horizon + self.obs_dim + self.sample_dim)
        least += self.horizon**2 if self.causal_attn else 0
        return layers, 12, least + (0 if self.encoder is None else self.encoder.weights)


class DiffusionTransformerPolicy(OwnPolicy):
    """One input `obs` (n_obs_steps, obs_dim), or those of the encoder: cameras (n_obs_steps, channels, height, width) and
    numbers (n_obs_steps, count)."""

    CONFIG = DPTConfig
    config: DPTConfig
    obs_encoder: ObservationEncoder | None

    def __init__(self, config: DPTConfig) -> None:
        super().__init__(config)
        self.model = DiffusionTransformer(
            input_dim=config.sample_dim,
            output_dim=config.sample_dim,
            cond_dim=config.obs_dim if config.obs_as_cond else 0,
            **{name: getattr(config, name) for name in _NETWORK},
        )
        sizes = {name: 1 if name in config.cameras else shape[-1] for name, shape in config.inputs.items()}
        self.normalizer = LinearNormalizer({**sizes, "action": config.action_dim})
        for name in config.cameras:  # from 0 to 1 it becomes from -1 to 1
            self.normalizer.field(name).fit(torch.tensor([[0.0], [1.0]]))
        encoder = None if config.encoder is None else ObservationEncoder(config.encoder)
        self.register_module("obs_encoder", encoder)

    @property
    def like(self) -> Tensor:
        return self.model.pos_emb

    @property
    def obs_dim(self) -> int:
        return self.config.obs_dim

    @property
    def noise_scheduler(self) -> Any:
        """A fresh scheduler, for code that reads its settings; the policy itself makes one per generation."""
        return make_scheduler(self.config.sampler)

    @property
    def num_inference_steps(self) -> int:
        return self.config.sampler.num_inference_steps

    def check(self, obs: Any) -> dict[str, Tensor]:
        config = self.config
        if config.encoder is None:
            return {"obs": check_observation(obs, config.n_obs_steps, config.obs_dim, self.like)}
        return check_tree(obs, config.inputs, config.cameras, self.like)

    def encode(self, observed: Mapping[str, Tensor]) -> Tensor:
        """What the denoiser attends to: the inputs normalised and, with cameras, encoded; (B, n_obs_steps, obs_dim)."""
        normalised = {name: self.normalizer.field(name).normalize(value) for name, value in observed.items()}
        if self.obs_encoder is None:
            return normalised["obs"]
        moments = {name: value.flatten(0, 1) for name, value in normalised.items()}
        features: Tensor = self.obs_encoder(moments)
        return features.reshape(-1, self.config.n_obs_steps, self.config.obs_dim)

    def denoiser_output(self, x: Tensor, t: Tensor, conditions: Tensor) -> Tensor:
        return self.model(x, t, conditions) if self.config.obs_as_cond else self.model(x, t)

    def constrain(self, x: Tensor, conditions: Tensor) -> Tensor:
        if not self.config.obs_as_cond:  # in-painted
            x = x.clone()
            x[:, : self.config.n_obs_steps, self.config.action_dim :] = conditions
        return x

    def actions(self, sample: Tensor, observed: Mapping[str, Tensor]) -> Tensor:
        return self.normalizer.action.unnormalize(sample[..., : self.config.action_dim])


CAMERA_FEATURES = 64  # of a camera


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
        if not 0 <= self.cameras * CAMERA_FEATURES <= self.obs_dim:
            raise PolicyError(
                f"each camera gives {CAMERA_FEATURES} of an observation's {self.obs_dim} numbers; got {self.cameras} cameras"
            )

    @property
    def encoder(self) -> EncoderConfig | None:
        numbers = self.obs_dim - self.cameras * CAMERA_FEATURES
        inputs = [Input(f"camera{index}" if index else "image", (3, 96, 96)) for index in range(self.cameras)]
        inputs += [Input("numbers", (numbers,))] if numbers else []
        return EncoderConfig(tuple(inputs), (76, 76), features=CAMERA_FEATURES) if self.cameras else None

    def policy(self) -> DiffusionTransformerPolicy:
        """Random weights, always the same ones."""
        same = ("obs_dim", "action_dim", "horizon", "n_obs_steps", "n_action_steps", "encoder")
        sizes: dict[str, Any] = {"n_layer": self.layers, "n_head": self.heads, "n_emb": self.width}
        sampler = SamplerConfig.from_dict({"type": self.sampler, "num_inference_steps": self.steps})
        config = DPTConfig(**{name: getattr(self, name) for name in same}, **sizes, sampler=sampler)
        return DiffusionTransformerPolicy.random(config)
