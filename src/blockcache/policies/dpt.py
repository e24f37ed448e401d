"""The DP-T policy: normaliser, denoiser and sampler behind one `predict_action`. Knows nothing of caching or tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blockcache.errors import ObservationError, PolicyError
from blockcache.policies.denoiser import DiffusionTransformer
from blockcache.policies.normalizer import LinearNormalizer
from blockcache.policies.sampling import denoise, draw_noise, make_scheduler, noise_shape
from blockcache.samplers import SamplerConfig, table

FAMILY = "dp-t"


@dataclass(frozen=True)
class DPTConfig:
    """What a policy directory's `config.json` says. `training` and `task` are for the record."""

    obs_dim: int
    action_dim: int
    horizon: int
    n_obs_steps: int
    n_action_steps: int
    n_layer: int = 8
    n_head: int = 4
    n_emb: int = 256
    n_cond_layers: int = 0
    causal_attn: bool = True
    time_as_cond: bool = True
    obs_as_cond: bool = True
    p_drop_emb: float = 0.0
    p_drop_attn: float = 0.0
    sampler: SamplerConfig = field(default_factory=lambda: SamplerConfig(type="ddpm"))
    family: str = FAMILY
    task: str | None = None
    weights: str | None = None
    training: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.family != FAMILY:
            raise PolicyError(f"this reads policies of family {FAMILY!r}, got {self.family!r}")
        for name in (
            "obs_dim",
            "action_dim",
            "horizon",
            "n_obs_steps",
            "n_action_steps",
            "n_layer",
            "n_head",
            "n_emb",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PolicyError(f"policy setting {name} must be a positive whole number, got {value!r}")
        if self.n_emb % self.n_head or self.n_emb % 2:
            raise PolicyError(f"n_emb must be even and divisible by n_head, got {self.n_emb} and {self.n_head}")
        if self.n_obs_steps - 1 + self.n_action_steps > self.horizon:
            raise PolicyError(
                f"the executed slice ends at {self.n_obs_steps - 1 + self.n_action_steps}, behind the horizon {self.horizon}"
            )
        if self.obs_as_cond and not self.time_as_cond:
            raise PolicyError("obs_as_cond needs time_as_cond: the encoder-only form in-paints its observations")

    @property
    def sample_dim(self) -> int:
        """Numbers per token: the action, and the observation too where it is in-painted."""
        return self.action_dim if self.obs_as_cond else self.action_dim + self.obs_dim

    @property
    def executed(self) -> slice:
        """The tokens whose actions the robot executes."""
        return slice(self.n_obs_steps - 1, self.n_obs_steps - 1 + self.n_action_steps)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DPTConfig:
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise PolicyError(f"unknown policy settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        try:
            return cls(**{**value, "sampler": SamplerConfig.from_dict(value["sampler"])})
        except KeyError as error:
            raise PolicyError(f"the policy's config lacks {error}") from error
        except TypeError as error:
            raise PolicyError(f"the policy's config does not fit: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return {"family": self.family, **asdict(self), "sampler": self.sampler.to_dict()}


class DiffusionTransformerPolicy(nn.Module):
    """Observations in, a chunk of actions out. Several threads may call it at once."""

    reentrant = True  # each generation has a scheduler of its own

    def __init__(self, config: DPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DiffusionTransformer(
            input_dim=config.sample_dim,
            output_dim=config.sample_dim,
            horizon=config.horizon,
            n_obs_steps=config.n_obs_steps,
            cond_dim=config.obs_dim if config.obs_as_cond else 0,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_emb=config.n_emb,
            p_drop_emb=config.p_drop_emb,
            p_drop_attn=config.p_drop_attn,
            causal_attn=config.causal_attn,
            time_as_cond=config.time_as_cond,
            n_cond_layers=config.n_cond_layers,
        )
        self.normalizer = LinearNormalizer(config.obs_dim, config.action_dim)

    @property
    def sampler(self) -> SamplerConfig:
        return self.config.sampler

    @property
    def noise_scheduler(self) -> Any:
        """A fresh scheduler, for code that reads its settings; the policy itself makes one per generation."""
        return make_scheduler(self.config.sampler)

    @property
    def num_inference_steps(self) -> int:
        return self.config.sampler.num_inference_steps

    def with_sampler(self, sampler: SamplerConfig) -> DiffusionTransformerPolicy:
        """The same weights (shared, not copied) behind another sampler."""
        other = DiffusionTransformerPolicy.__new__(DiffusionTransformerPolicy)
        nn.Module.__init__(other)
        other.config = replace(self.config, sampler=sampler)
        other.model, other.normalizer = self.model, self.normalizer
        other.train(self.training)
        return other

    @torch.no_grad()
    def predict_action(
        self,
        obs: Tensor | np.ndarray[Any, Any] | Mapping[str, Any],
        *,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """One generation: obs (B, n_obs_steps, obs_dim) -> action (B, n_action_steps, A), action_pred (B, horizon, A).

        Noise comes from `generator` (torch's global one without it) or, all of it, from `noise`; see `draw_noise`.
        """
        observed = self.normalizer.obs.normalize(self.check_observation(obs))
        return self.finish(self._sample(observed, generator, noise))

    def draw_noise(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """All the noise of one generation, (1 + draws, B, horizon, D), exactly as `generator` would give it."""
        shape = noise_shape(table(self.config.sampler), (batch, self.config.horizon, self.config.sample_dim))
        return draw_noise(shape, self.model.pos_emb, generator)

    def check_observation(self, obs: Tensor | np.ndarray[Any, Any] | Mapping[str, Any]) -> Tensor:
        """The observation as a tensor on the policy's device, or a sentence saying what is wrong with it."""
        if isinstance(obs, Mapping):
            if "obs" not in obs:
                raise ObservationError(f"the observation has no key 'obs', got {sorted(map(str, obs))}")
            obs = obs["obs"]
        try:
            tensor = torch.as_tensor(obs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ObservationError(f"the observation is not an array of numbers: {error}") from error
        expected = (self.config.n_obs_steps, self.config.obs_dim)
        if tensor.ndim != 3 or tuple(tensor.shape[1:]) != expected or tensor.shape[0] < 1:
            raise ObservationError(
                f"the observation has shape {tuple(tensor.shape)}, expected (batch, {expected[0]}, {expected[1]})"
            )
        tensor = tensor.to(device=self.model.pos_emb.device, dtype=self.model.pos_emb.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise ObservationError(
                "the observation holds NaN or infinity; check the sensor before asking for an action"
            )
        return tensor

    def finish(self, sample: Tensor) -> dict[str, Tensor]:
        """A normalised sample (B, horizon, D) -> actions in robot units."""
        actions = self.normalizer.action.unnormalize(sample[..., : self.config.action_dim])
        return {"action": actions[:, self.config.executed], "action_pred": actions}

    def _sample(self, observed: Tensor, generator: torch.Generator | None, noise: Tensor | None) -> Tensor:
        chunk = (observed.shape[0], self.config.horizon, self.config.sample_dim)
        if self.config.obs_as_cond:
            return denoise(
                self.config.sampler,
                lambda x, t: self.model(x, t, observed),
                chunk,
                observed,
                generator=generator,
                noise=noise,
            )

        def inpaint(x: Tensor) -> Tensor:
            x = x.clone()
            x[:, : self.config.n_obs_steps, self.config.action_dim :] = observed
            return x

        return denoise(
            self.config.sampler,
            lambda x, t: self.model(x, t),
            chunk,
            observed,
            generator=generator,
            noise=noise,
            constrain=inpaint,
        )
