"""The DiT policy: normaliser, encoder (for cameras and language), denoiser and sampler behind one `predict_action`.

Knows nothing of caching or tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.models.dit.clip import ClipEncoder
from blockcache.models.dit.config import DiTConfig
from blockcache.models.dit.denoiser import DiT
from blockcache.models.dit.normalizer import Normalizer
from blockcache.models.noise import draw_all
from blockcache.models.sampling import denoise
from blockcache.observations.tensors import Observation, check_tree
from blockcache.samplers import SamplerConfig, table


class DiTPolicy(nn.Module):
    """Observations in, a chunk of actions out. Several threads may call it at once."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.noise_predictor = DiT(
            action_dim=config.action_dim,
            horizon=config.horizon,
            cond_dim=config.cond_dim,
            width=config.hidden_dim,
            layers=config.num_layers,
            heads=config.num_heads,
            time_dim=config.timestep_embed_dim,
            rope_base=config.rope_base if config.use_rope else None,
            positions=config.use_positional_encoding,
        )
        encoder = config.encoder
        self.observation_encoder = None if encoder is None else ClipEncoder(encoder, config.hidden_dim)
        frames = {} if encoder is None else dict.fromkeys(encoder.cameras, 3)
        self.normalizer = Normalizer({**config.state, **frames, **config.vectors, "action": config.action_dim})

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @property
    def n_obs_steps(self) -> int:
        return self.config.n_obs_steps

    @property
    def n_action_steps(self) -> int:
        return self.config.n_action_steps

    @property
    def sampler(self) -> SamplerConfig:
        return self.config.sampler

    @property
    def cameras(self) -> tuple[str, ...]:
        return () if self.config.encoder is None else self.config.encoder.cameras

    def with_sampler(self, sampler: SamplerConfig) -> DiTPolicy:
        """The same weights (shared, not copied) behind another sampler."""
        other = DiTPolicy.__new__(DiTPolicy)
        nn.Module.__init__(other)
        other.config = replace(self.config, sampler=sampler)
        other.noise_predictor, other.normalizer = self.noise_predictor, self.normalizer
        other.observation_encoder = self.observation_encoder
        vars(other)["training"] = vars(self)["training"]  # its own flag only: the shared modules keep theirs
        return other

    @torch.no_grad()
    def predict_action(
        self,
        obs: Observation,
        *,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """One generation: action (B, n_action_steps, A) and action_pred (B, horizon, A), in robot units.

        obs        arrays by the names of the config's inputs: state (B, n_obs_steps, numbers), cameras (B, n_obs_steps, 3,
                   height, width) as uint8 or as floats from 0 to 1, tokens and vectors (B, numbers); a bare array where the
                   policy has one input
        generator  draws the noise, torch's global one without it
        noise      all of it, see `draw_noise`
        """
        condition = self.encode(self.check(obs))
        chunk = (len(condition), self.config.horizon, self.config.action_dim)
        sample = denoise(
            self.config.sampler,
            lambda x, t: self.noise_predictor(x, t, condition),
            chunk,
            condition,
            generator=generator,
            noise=noise,
        )
        actions = self.normalizer.action.unnormalize(sample)
        return {"action": actions[:, self.config.executed], "action_pred": actions}

    def check(self, obs: Any) -> dict[str, Tensor]:
        """The observation by its inputs' names, in robot units, or a sentence saying what is wrong with it."""
        inputs = self.config.inputs
        if len(inputs) == 1:
            (name,) = inputs
            if not isinstance(obs, Mapping):
                obs = {name: obs}
            elif name not in obs and "obs" in obs:
                obs = {name: obs["obs"]}
        return check_tree(obs, inputs, self.cameras, self.like)

    def encode(self, observed: Mapping[str, Tensor]) -> Tensor:
        """The conditioning vector (B, C) of a checked observation."""
        config, normalizer = self.config, self.normalizer
        parts = [normalizer.field(name).normalize(observed[name]) for name in config.state]  # (B, n_obs, numbers) each
        if self.observation_encoder is not None:
            frames = {name: normalizer.field(name).normalize(observed[name], axis=-3) for name in self.cameras}
            parts += self.observation_encoder(frames, observed, config.n_obs_steps)
        moments = torch.cat(parts, dim=-1).flatten(1)
        vectors = [normalizer.field(name).normalize(observed[name]) for name in config.vectors]
        return torch.cat([moments, *vectors], dim=-1)

    def draw_noise(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """All the noise of one generation, (1 + draws, B, horizon, A), exactly as `generator` would give it."""
        chunk = (batch, self.config.horizon, self.config.action_dim)
        return draw_all(table(self.config.sampler), chunk, self.like, generator)

    @property
    def like(self) -> Tensor:
        """A tensor with the policy's precision and device."""
        return self.noise_predictor.input_proj.weight
