"""The DiT policy: normaliser, encoder (for cameras and language), denoiser and sampler behind one `predict_action`.

Knows nothing of caching or tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from blockcache.errors import PolicyError, short
from blockcache.files import Limit
from blockcache.models.dit.clip import FEATURE, MASK, TOKENS, ClipConfig, ClipEncoder
from blockcache.models.dit.denoiser import CHUNKS, DiT
from blockcache.models.normalizer import ShiftedNormalizer, field_name
from blockcache.models.own_policy import Depth, OwnPolicy, PolicyConfig, Size
from blockcache.observations.tensors import check_tree
from blockcache.samplers import DDPM, Euler, SamplerConfig

FAMILY = "dit"
_TAKEN = ("action", "action_pred", "conditioning", "features", "kept_features", "noise", "norms", FEATURE)
"""Names that files and exports use for something else."""


@dataclass(frozen=True, kw_only=True)
class DiTConfig(PolicyConfig):
    """The sizes of a policy; names as LeRobot's where it has them.

    state: numbers of each input at one moment, by name; `n_obs_steps` moments of them are seen.
    vectors: numbers of each input that has no moments, such as a goal, by name.
    encoder: cameras and language, which become numbers of every moment behind the state; None has neither.

    The conditioning vector is, moment by moment, the state, what the cameras show and what the words say; then the vectors.
    """

    FAMILY: ClassVar[str] = FAMILY
    state: Annotated[Mapping[str, Size], Limit(1, 100)]
    horizon: Size = 32
    n_obs_steps: Size = 2
    n_action_steps: Size = 24
    num_layers: Depth = 6
    num_heads: Size = 8
    hidden_dim: Size = 512
    timestep_embed_dim: Size = 256
    use_rope: bool = True
    rope_base: Annotated[float, Limit(1, 1e9)] = 10_000.0
    use_positional_encoding: bool = False
    vectors: Annotated[Mapping[str, Size], Limit(0, 100)] = field(default_factory=dict)
    encoder: ClipConfig | None = None
    family: str = FAMILY

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_dim % self.num_heads or (self.use_rope and self.hidden_dim // self.num_heads % 2):
            even = " into an even number each, which rotary positions need" if self.use_rope else ""
            raise PolicyError(
                f"hidden_dim must be divisible by num_heads{even}, got {self.hidden_dim} and {self.num_heads}"
            )
        if self.timestep_embed_dim % 2 or self.timestep_embed_dim < 4:
            raise PolicyError(f"timestep_embed_dim must be even, 4 or more, got {self.timestep_embed_dim}")
        names = list(self.inputs)
        if len(names) < len(self.state) + len(self.vectors) + (self.encoder is not None and len(self.encoder.inputs)):
            raise PolicyError("two inputs of the policy have one name; give each its own")
        for name in names:
            if name in _TAKEN or not 1 <= len(name) <= 200:
                raise PolicyError(f"an input cannot be called {short(name)}; give it another name")
        if len({field_name(name) for name in names}) < len(names):
            raise PolicyError("two inputs of the policy have names that differ in dots alone; give them other names")

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        moments = {name: (self.n_obs_steps, size) for name, size in self.state.items()}
        seen = {} if self.encoder is None else self.encoder.shapes(self.n_obs_steps)
        return {**moments, **seen, **{name: (size,) for name, size in self.vectors.items()}}

    @property
    def cameras(self) -> tuple[str, ...]:
        return () if self.encoder is None else self.encoder.cameras

    @property
    def cond_dim(self) -> int:
        """Numbers of the conditioning vector."""
        encoded = 0 if self.encoder is None else self.encoder.features + self.hidden_dim
        return self.n_obs_steps * (sum(self.state.values()) + encoded) + sum(self.vectors.values())

    @property
    def least_weights(self) -> tuple[int, int, int]:
        width, layers, time = self.hidden_dim, self.num_layers, self.timestep_embed_dim
        least = layers * width * (12 * width + CHUNKS * (time + self.cond_dim)) + 2 * time**2
        least += self.horizon * width * self.use_positional_encoding + 2 * width * self.action_dim
        for tower in () if self.encoder is None else (self.encoder.vision, self.encoder.text):
            if tower is not None:
                least += tower.layers * 4 * tower.width**2 + tower.places * tower.width
                layers += tower.layers
        return layers, 8, least


class DiTPolicy(OwnPolicy):
    """Inputs: state (n_obs_steps, numbers), cameras (n_obs_steps, 3, height, width), token ids with their mask, and vectors
    (numbers,)."""

    CONFIG = DiTConfig
    config: DiTConfig
    observation_encoder: ClipEncoder | None

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
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
        encoder = None if config.encoder is None else ClipEncoder(config.encoder, config.hidden_dim)
        self.register_module("observation_encoder", encoder)
        frames = dict.fromkeys(config.cameras, 3)
        sizes = {**config.state, **frames, **config.vectors, "action": config.action_dim}
        self.normalizer = ShiftedNormalizer(sizes)

    @property
    def like(self) -> Tensor:
        return self.noise_predictor.input_proj.weight

    def check(self, obs: Any) -> dict[str, Tensor]:
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

    @torch.no_grad()
    def language_feature(self, tokens: Any, mask: Any) -> Tensor:
        """What the text encoder makes of an instruction, (B, hidden_dim): once for a task, for exports that take it.

        Args:
            tokens: the token ids, (B, tokens), as LeRobot's tokenizing processor makes them.
            mask: which of them are words, (B, tokens).
        """
        encoder = self.observation_encoder
        if encoder is None:
            raise PolicyError("this policy has no text encoder, so that no words are said to it")
        shapes = dict.fromkeys((TOKENS, MASK), (encoder.config.tokens,))
        found = check_tree({TOKENS: tokens, MASK: mask}, shapes, (), self.like)
        return encoder.say(found[TOKENS], found[MASK])

    def denoiser_output(self, x: Tensor, t: Tensor, conditions: Tensor) -> Tensor:
        return self.noise_predictor(x, t, conditions)

    def actions(self, sample: Tensor, observed: Mapping[str, Tensor]) -> Tensor:
        return self.normalizer.action.unnormalize(sample)


def ddpm() -> DiTPolicy:
    """LeRobot's default size with random weights, by 100 DDPM steps, to measure speed; it begins where its encoders end."""
    return _default_size(DDPM(num_inference_steps=100))


def euler() -> DiTPolicy:
    """The same by flow matching: 100 Euler steps, as LeRobot takes them where nothing else is said."""
    return _default_size(Euler(num_inference_steps=100))


def _default_size(sampler: SamplerConfig) -> DiTPolicy:
    moment = {"obs": 14 + 768 + 512}  # a state of two arms, what CLIP makes of one camera, and of the words
    return DiTPolicy.random(DiTConfig(state=moment, action_dim=14, sampler=sampler))
