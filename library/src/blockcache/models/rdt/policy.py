"""The RDT policy: observation with encoded language and frames in, a chunk of actions out.

The encoders are not part of it: language and image tokens come in as a T5 and a SigLIP made them. Knows nothing of caching
or tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.errors import ObservationError, PolicyError, short
from blockcache.files import Limit
from blockcache.models.own_policy import Depth, OwnPolicy, PolicyConfig, Size
from blockcache.models.rdt.denoiser import ADAPTORS, RDTDenoiser, linears_of
from blockcache.observations import one_moment
from blockcache.observations.tensors import as_tensor, check_tree
from blockcache.samplers import DPMSolver, SamplerConfig

FAMILY = "rdt"
NORMS = ("std", "rms")
"""How the norms divide: by the standard deviation around the mean, as the timm 1.0.3 that the public code asks for does it
where Apex is missing, or by the root mean square, as Apex and newer versions of timm do."""
LANGUAGE, MASK = "lang_tokens", "lang_attn_mask"


def public_sampler(steps: int = 5) -> DPMSolver:
    """The sampler of the public code: DPM-Solver++ that predicts the clean sample; 5 steps there, 20 in the paper.

    Args:
        steps: how often the denoiser is called.
    """
    return DPMSolver(num_inference_steps=steps, num_train_timesteps=1000, prediction_type="sample")


@dataclass(frozen=True, kw_only=True)
class RDTConfig(PolicyConfig):
    """Names are those of the public code, the defaults RDT-1B's.

    lang_len: language tokens of an observation, shorter ones are filled up and masked; `max_lang_cond_len` without it.
    norm: one of `NORMS`.
    """

    FAMILY: ClassVar[str] = FAMILY
    action_dim: Size = 128
    horizon: Size = 64
    n_obs_steps: Annotated[int, Limit(1, 1)] = 1
    n_action_steps: Size = 64
    hidden_size: Size = 2048
    depth: Depth = 28
    num_heads: Size = 32
    lang_token_dim: Size = 4096
    img_token_dim: Size = 1152
    max_lang_cond_len: Size = 1024
    img_cond_len: Size = 4374
    lang_len: Size = field(default=None)  # type: ignore[assignment]  # filled in below
    lang_adaptor: str = "mlp2x_gelu"
    img_adaptor: str = "mlp2x_gelu"
    state_adaptor: str = "mlp3x_gelu"
    norm: str = "std"
    sampler: SamplerConfig = field(default_factory=public_sampler)
    family: str = FAMILY

    def __post_init__(self) -> None:
        if self.lang_len is None:
            object.__setattr__(self, "lang_len", self.max_lang_cond_len)
        super().__post_init__()
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads < 2:
            raise PolicyError(
                f"hidden_size must be 2 or more for each head, the same for all, got {self.hidden_size} and "
                f"{self.num_heads} heads"
            )
        if self.lang_len > self.max_lang_cond_len:
            raise PolicyError(
                f"policy setting lang_len is {self.lang_len}, expected {self.max_lang_cond_len} at most: the places that "
                "the policy knows"
            )
        for name in ADAPTORS:
            linears_of(getattr(self, name))
        if self.norm not in NORMS:
            raise PolicyError(f"policy setting norm must be one of {', '.join(NORMS)}, got {short(self.norm)}")

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        return {
            "state_tokens": (1, self.action_dim),
            LANGUAGE: (self.lang_len, self.lang_token_dim),
            MASK: (self.lang_len,),
            "img_tokens": (self.img_cond_len, self.img_token_dim),
            "action_mask": (1, self.action_dim),
            "ctrl_freqs": (1,),
        }

    @property
    def least_weights(self) -> tuple[int, int, int]:
        width, tokens = self.hidden_size, self.max_lang_cond_len + self.img_cond_len + self.horizon
        inputs = self.lang_token_dim + self.img_token_dim + self.action_dim
        return self.depth, 21, width * (9 * self.depth * width + tokens + inputs)


class RDTPolicy(OwnPolicy):
    """Inputs, each of which may have an axis of one step behind the batch, as the observations of a rollout do:

    state_tokens: (1, A) the robot's state, in the numbers that actions have.
    lang_tokens: (L, lang_token_dim) the instruction, L up to `lang_len`.
    lang_attn_mask: (L,) which of its tokens are there, true or false (1 or 0).
    img_tokens: (img_cond_len, img_token_dim) what the cameras see.
    action_mask: (1, A) which numbers the robot has, 1 or 0; the others of an action come out as 0.
    ctrl_freqs: () or (1,) actions per second.

    Args:
        config: sizes and sampler.
        denoiser: the transformer with its adaptors; without it one with random weights.
    """

    CONFIG = RDTConfig
    config: RDTConfig

    def __init__(self, config: RDTConfig, denoiser: RDTDenoiser | None = None) -> None:
        super().__init__(config)
        self.denoiser = RDTDenoiser.of(config) if denoiser is None else denoiser

    @classmethod
    def unfilled(cls, config: Any) -> RDTPolicy:
        """Without numbers: the network takes over those of a file, so that they are in memory once."""
        with torch.device("meta"):
            return cls(config)

    @property
    def stored(self) -> nn.Module:
        return self.denoiser

    @property
    def like(self) -> Tensor:
        places: Any = self.denoiser.model.x_pos_embed
        return places

    def with_lang_len(self, lang_len: int) -> RDTPolicy:
        """The same weights for observations of so many language tokens: fewer cost less."""
        return self._with(lang_len=lang_len)

    def denoiser_output(self, x: Tensor, t: Tensor, conditions: tuple[Tensor, ...]) -> Tensor:
        return self.denoiser(x, t, *conditions)

    def actions(self, sample: Tensor, observed: Mapping[str, Tensor]) -> Tensor:
        return sample * observed["action_mask"]

    def encode(self, observed: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the denoiser is given throughout a generation, in its order: a checked observation, adapted."""
        mask = observed["action_mask"]
        return (
            self.denoiser.state_adaptor(torch.cat([observed["state_tokens"], mask], dim=-1)),
            self.denoiser.lang_adaptor(observed[LANGUAGE]),
            observed[MASK] > 0,
            self.denoiser.img_adaptor(observed["img_tokens"]),
            mask,
            observed["ctrl_freqs"].flatten(),
        )

    def check(self, obs: Any) -> dict[str, Tensor]:
        found = check_tree(self._filled(obs) if isinstance(obs, Mapping) else obs, self.config.inputs, (), self.like)
        for name in (MASK, "action_mask"):
            if bool(((found[name] != 0) & (found[name] != 1)).any()):
                raise ObservationError(f"the observation {name!r} is a mask: expected true or false, 1 or 0")
        if bool((found[MASK] == 0).all(dim=1).any()):
            raise ObservationError(
                f"the observation {MASK!r} hides all language tokens of a sample: there is nothing to attend to; give the "
                "tokens of an empty instruction"
            )
        return found

    def _filled(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Language of fewer tokens than `lang_len` gets more, which the mask hides; frequencies become a column. A rollout
        gives every input an axis of the observation's steps, of which there is one: that is taken away."""
        shapes = self.config.inputs
        found = {
            name: one_moment(value, shapes[name]) if name in shapes and hasattr(value, "ndim") else value
            for name, value in obs.items()
            if value is not None
        }
        if {LANGUAGE, MASK} <= found.keys():
            tokens, mask = (as_tensor(found[name], f"the observation {name!r}") for name in (LANGUAGE, MASK))
            if tokens.ndim != 3 or mask.ndim != 2 or mask.shape != tokens.shape[:2]:
                raise ObservationError(
                    f"the observation {MASK!r} has shape {tuple(mask.shape)}, expected one value for each of the language "
                    f"tokens, which have shape {tuple(tokens.shape)}"
                )
            missing = self.config.lang_len - tokens.shape[1]
            if missing < 0:
                raise ObservationError(
                    f"the observation {LANGUAGE!r} has {tokens.shape[1]} tokens, expected {self.config.lang_len} at most "
                    "(lang_len); cut the instruction short, or take policy.with_lang_len(...)"
                )
            found[LANGUAGE], found[MASK] = F.pad(tokens, (0, 0, 0, missing)), F.pad(mask, (0, missing))
        if "ctrl_freqs" in found:
            rates = as_tensor(found["ctrl_freqs"], "the observation 'ctrl_freqs'")
            found["ctrl_freqs"] = rates[:, None] if rates.ndim == 1 else rates
        return found
