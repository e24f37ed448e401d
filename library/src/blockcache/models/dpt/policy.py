"""The DP-T policy: normaliser, encoder (for cameras), denoiser and sampler behind one `predict_action`.

Knows nothing of caching or tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError, short
from blockcache.files import Fields, Name
from blockcache.models.dpt.denoiser import DiffusionTransformer
from blockcache.models.dpt.encoder import ObservationEncoder
from blockcache.models.dpt.encoder_config import EncoderConfig
from blockcache.models.dpt.normalizer import LinearNormalizer
from blockcache.models.noise import draw_all
from blockcache.models.sampling import denoise, make_scheduler
from blockcache.models.settings import check_sampler_and_record, check_sizes_of, refuse_unknown
from blockcache.observations.tensors import Observation, check_observation, check_tree
from blockcache.samplers import DDPM, SamplerConfig, table

FAMILY = "dp-t"
_SIZES = {
    **dict.fromkeys(("obs_dim", "action_dim", "horizon", "n_obs_steps", "n_action_steps"), 100_000),
    "n_layer": 1_000,
    **dict.fromkeys(("n_head", "n_emb"), 100_000),
}
"""The largest that each may be; whether the weights are of that size too is seen before anything is made of it."""
_RECORD = Fields({"task": Name | None, "weights": Name | None, "training": dict | None})


@dataclass(frozen=True)
class DPTConfig:
    """What a policy directory's `config.json` says. `training` and `task` are for the record.

    With an `encoder` the policy looks through cameras, and `obs_dim` is the size of what the encoder makes of a moment.
    """

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
    sampler: SamplerConfig = field(default_factory=DDPM)
    encoder: EncoderConfig | None = None
    family: str = FAMILY
    task: str | None = None
    weights: str | None = None
    training: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.family != FAMILY:
            raise PolicyError(f"this reads policies of family {FAMILY!r}, got {short(self.family)}")
        check_sizes_of(self, _SIZES)
        if self.n_emb % self.n_head or self.n_emb % 2 or self.n_emb < 4:
            raise PolicyError(f"n_emb must be even, 4 or more, divisible by n_head, got {self.n_emb} and {self.n_head}")
        if type(self.n_cond_layers) is not int or not 0 <= self.n_cond_layers <= _SIZES["n_layer"]:
            got = short(self.n_cond_layers)
            raise PolicyError(
                f"policy setting n_cond_layers must be 0 or more, {_SIZES['n_layer']:,} at most, got {got}"
            )
        for name in ("causal_attn", "time_as_cond", "obs_as_cond"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"policy setting {name} must be true or false, got {short(getattr(self, name))}")
        for name in ("p_drop_emb", "p_drop_attn"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
                raise PolicyError(f"policy setting {name} must be from 0 to below 1, got {short(value)}")
        check_sampler_and_record(self, _RECORD)
        if self.n_obs_steps - 1 + self.n_action_steps > self.horizon:
            end = self.n_obs_steps - 1 + self.n_action_steps
            raise PolicyError(f"the executed slice ends at {end}, behind the horizon {self.horizon}")
        if self.obs_as_cond and not self.time_as_cond:
            raise PolicyError("obs_as_cond needs time_as_cond: the encoder-only form in-paints its observations")
        self._check_encoder()

    def _check_encoder(self) -> None:
        if self.encoder is None:
            return
        if not isinstance(self.encoder, EncoderConfig):
            raise PolicyError(f"policy setting encoder must be an encoder's config, got {short(self.encoder)}")
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
    def executed(self) -> slice:
        """The tokens whose actions the robot executes."""
        return slice(self.n_obs_steps - 1, self.n_obs_steps - 1 + self.n_action_steps)

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The observation: shapes by name, without the batch."""
        if self.encoder is None:
            return {"obs": (self.n_obs_steps, self.obs_dim)}
        return {item.name: (self.n_obs_steps, *item.shape) for item in self.encoder.inputs}

    @property
    def cameras(self) -> tuple[str, ...]:
        """Which of the inputs are frames."""
        return () if self.encoder is None else tuple(item.name for item in self.encoder.cameras)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DPTConfig:
        refuse_unknown(cls, value)
        try:
            sees = value.get("encoder")
            encoder = None if sees is None else EncoderConfig.from_dict(sees)
            return cls(**{**value, "sampler": SamplerConfig.from_dict(value["sampler"]), "encoder": encoder})
        except KeyError as error:
            raise PolicyError(f"the policy's config lacks {error}") from error
        except TypeError as error:
            raise PolicyError(f"the policy's config does not fit: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        content = {"family": self.family, **asdict(self), "sampler": self.sampler.to_dict()}
        if self.encoder is None:
            del content["encoder"]
            return content
        return {**content, "encoder": self.encoder.to_dict()}


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
        sizes = {name: 1 if name in config.cameras else shape[-1] for name, shape in config.inputs.items()}
        self.normalizer = LinearNormalizer({**sizes, "action": config.action_dim})
        for name in config.cameras:  # from 0 to 1 it becomes from -1 to 1
            self.normalizer.field(name).fit(torch.tensor([[0.0], [1.0]]))
        self.obs_encoder = None if config.encoder is None else ObservationEncoder(config.encoder)

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
    def obs_dim(self) -> int:
        return self.config.obs_dim

    @property
    def action_dim(self) -> int:
        return self.config.action_dim

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
        other.model, other.normalizer, other.obs_encoder = self.model, self.normalizer, self.obs_encoder
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
        """One generation: obs (B, n_obs_steps, obs_dim) -> action (B, n_action_steps, A), action_pred (B, horizon, A).

        A policy with an encoder takes a mapping: cameras (B, n_obs_steps, channels, height, width) as uint8 or as floats
        from 0 to 1, numbers (B, n_obs_steps, count). Noise comes from `generator` (torch's global one without it) or, all of
        it, from `noise`; see `draw_noise`.
        """
        sample = self._sample(self.encode(self.check(obs)), generator, noise)
        actions = self.normalizer.action.unnormalize(sample[..., : self.config.action_dim])
        return {"action": actions[:, self.config.executed], "action_pred": actions}

    def check(self, obs: Observation) -> dict[str, Tensor]:
        """The observation by its inputs' names, in robot units, or a sentence saying what is wrong with it."""
        config, like = self.config, self.model.pos_emb
        if config.encoder is None:
            return {"obs": check_observation(obs, config.n_obs_steps, config.obs_dim, like)}
        return check_tree(obs, config.inputs, config.cameras, like)

    def encode(self, observed: Mapping[str, Tensor]) -> Tensor:
        """What the denoiser attends to: the inputs normalised and, with cameras, encoded; (B, n_obs_steps, obs_dim)."""
        normalised = {name: self.normalizer.field(name).normalize(value) for name, value in observed.items()}
        if self.obs_encoder is None:
            return normalised["obs"]
        moments = {name: value.flatten(0, 1) for name, value in normalised.items()}
        features: Tensor = self.obs_encoder(moments)
        return features.reshape(-1, self.config.n_obs_steps, self.config.obs_dim)

    def draw_noise(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """All the noise of one generation, (1 + draws, B, horizon, D), exactly as `generator` would give it."""
        chunk = (batch, self.config.horizon, self.config.sample_dim)
        return draw_all(table(self.config.sampler), chunk, self.model.pos_emb, generator)

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
