"""What an RDT policy is: sizes, adaptors, norms and sampler, as `config.json` says them. Knows nothing of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from blockcache.errors import PolicyError, short
from blockcache.files import Fields, Name
from blockcache.models.settings import check_sampler_and_record, check_sizes_of, refuse_unknown
from blockcache.samplers import SamplerConfig
from blockcache.samplers.dpmsolver import DPMSolver

FAMILY = "rdt"
NORMS = ("std", "rms")
"""How the norms divide: by the standard deviation around the mean, as the timm 1.0.3 that the public code asks for does it
where Apex is missing, or by the root mean square, as Apex and newer versions of timm do."""
ADAPTORS = ("lang_adaptor", "img_adaptor", "state_adaptor")
_MLP = re.compile(r"mlp([1-9])x_gelu")
_SIZES = {
    **dict.fromkeys(("action_dim", "horizon", "n_action_steps", "hidden_size", "num_heads"), 100_000),
    **dict.fromkeys(("lang_token_dim", "img_token_dim", "max_lang_cond_len", "img_cond_len", "lang_len"), 100_000),
    "depth": 1_000,
}
_RECORD = Fields({"task": Name | None, "training": dict | None})


def public_sampler(steps: int = 5) -> DPMSolver:
    """The sampler of the public code: DPM-Solver++ that predicts the clean sample; 5 steps there, 20 in the paper."""
    return DPMSolver(num_inference_steps=steps, num_train_timesteps=1000, prediction_type="sample")


def linears_of(adaptor: str) -> int:
    """How many matrices an adaptor has, by the name that the public code gives it."""
    if adaptor == "linear":
        return 1
    found = _MLP.fullmatch(adaptor)
    if found is None:
        raise PolicyError(f"an adaptor must be 'linear' or 'mlpNx_gelu', N from 1 to 9, got {short(adaptor)}")
    return int(found.group(1))


@dataclass(frozen=True)
class RDTConfig:
    """What a policy directory's `config.json` says; names are those of the public code. The defaults are RDT-1B's.

    lang_len: language tokens of an observation, shorter ones are filled up and masked; `max_lang_cond_len` without it.
    norm: one of `NORMS`.
    task, training: for the record.
    """

    action_dim: int = 128
    horizon: int = 64
    n_action_steps: int = 64
    hidden_size: int = 2048
    depth: int = 28
    num_heads: int = 32
    lang_token_dim: int = 4096
    img_token_dim: int = 1152
    max_lang_cond_len: int = 1024
    img_cond_len: int = 4374
    lang_len: int = field(default=None)  # type: ignore[assignment]  # filled in below
    lang_adaptor: str = "mlp2x_gelu"
    img_adaptor: str = "mlp2x_gelu"
    state_adaptor: str = "mlp3x_gelu"
    norm: str = "std"
    sampler: SamplerConfig = field(default_factory=public_sampler)
    family: str = FAMILY
    task: str | None = None
    training: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.family != FAMILY:
            raise PolicyError(f"this reads policies of family {FAMILY!r}, got {short(self.family)}")
        if self.lang_len is None:
            object.__setattr__(self, "lang_len", self.max_lang_cond_len)
        check_sizes_of(self, _SIZES)
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
        if self.n_action_steps > self.horizon:
            raise PolicyError(f"the executed slice ends at {self.n_action_steps}, behind the horizon {self.horizon}")
        for name in ADAPTORS:
            if not isinstance(getattr(self, name), str):
                raise PolicyError(f"policy setting {name} must be a name, got {short(getattr(self, name))}")
            linears_of(getattr(self, name))
        if self.norm not in NORMS:
            raise PolicyError(f"policy setting norm must be one of {', '.join(NORMS)}, got {short(self.norm)}")
        check_sampler_and_record(self, _RECORD)

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The observation: shapes by name, without the batch."""
        return {
            "state_tokens": (1, self.action_dim),
            "lang_tokens": (self.lang_len, self.lang_token_dim),
            "lang_attn_mask": (self.lang_len,),
            "img_tokens": (self.img_cond_len, self.img_token_dim),
            "action_mask": (1, self.action_dim),
            "ctrl_freqs": (1,),
        }

    @property
    def numbers(self) -> int:
        """How many numbers the large matrices of its weights hold: a lower bound of all of them."""
        width, tokens = self.hidden_size, self.max_lang_cond_len + self.img_cond_len + self.horizon
        return width * (9 * self.depth * width + tokens + self.lang_token_dim + self.img_token_dim + self.action_dim)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> RDTConfig:
        refuse_unknown(cls, value)
        try:
            return cls(**{**value, "sampler": SamplerConfig.from_dict(value["sampler"])})
        except KeyError as error:
            raise PolicyError(f"the policy's config lacks {error}") from error
        except TypeError as error:
            raise PolicyError(f"the policy's config does not fit: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sampler": self.sampler.to_dict()}
