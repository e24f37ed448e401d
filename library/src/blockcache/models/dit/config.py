"""What a DiT policy directory's `config.json` says. Knows nothing of files and networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Annotated, Any, TypeAlias

from blockcache.errors import ContentError, PolicyError, short
from blockcache.files import Fields, Limit, Name, read
from blockcache.models.dit.clip_config import ClipConfig
from blockcache.models.settings import refuse_unknown
from blockcache.samplers import DDPM, SamplerConfig

FAMILY = "dit"
_TAKEN = ("action", "action_pred", "conditioning", "features", "kept_features", "noise", "norms")
Size: TypeAlias = Annotated[int, Limit(1, 100_000)]
Sizes: TypeAlias = Annotated[dict[str, Size], Limit(0, 100)]
_KINDS: dict[str, Any] = {
    "state": Annotated[dict[str, Size], Limit(1, 100)],
    **dict.fromkeys(("action_dim", "horizon", "n_obs_steps", "n_action_steps"), Size),
    "num_layers": Annotated[int, Limit(1, 1_000)],
    **dict.fromkeys(("num_heads", "hidden_dim", "timestep_embed_dim"), Size),
    **dict.fromkeys(("use_rope", "use_positional_encoding"), bool),
    "rope_base": Annotated[float, Limit(1, 1e9)],
    "vectors": Sizes,
    "sampler": SamplerConfig,
    "encoder": ClipConfig | None,
    "family": str,
    **dict.fromkeys(("task", "weights"), Name | None),
    "training": dict | None,
}


@dataclass(frozen=True)
class DiTConfig:
    """The sizes of a policy; names as LeRobot's where it has them. `training` and `task` are for the record.

    state    numbers of each input at one moment, by name; `n_obs_steps` moments of them are seen
    vectors  numbers of each input that has no moments, such as a goal, by name
    encoder  cameras and language, which become numbers of every moment behind the state; None has neither

    The conditioning vector is, moment by moment, the state, what the cameras show and what the words say; then the vectors.
    """

    state: Mapping[str, int]
    action_dim: int
    horizon: int = 32
    n_obs_steps: int = 2
    n_action_steps: int = 24
    num_layers: int = 6
    num_heads: int = 8
    hidden_dim: int = 512
    timestep_embed_dim: int = 256
    use_rope: bool = True
    rope_base: float = 10_000.0
    use_positional_encoding: bool = False
    vectors: Mapping[str, int] = field(default_factory=dict)
    sampler: SamplerConfig = field(default_factory=DDPM)
    encoder: ClipConfig | None = None
    family: str = FAMILY
    task: str | None = None
    weights: str | None = None
    training: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.family != FAMILY:
            raise PolicyError(f"this reads policies of family {FAMILY!r}, got {short(self.family)}")
        if not isinstance(self.sampler, SamplerConfig):
            raise PolicyError(f"policy setting sampler must be a sampler's config, got {short(self.sampler)}")
        if not isinstance(self.encoder, ClipConfig | None):
            raise PolicyError(f"policy setting encoder must be an encoder's config, got {short(self.encoder)}")
        apart = ("sampler", "encoder")
        plain = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in apart}
        try:
            read(Fields({name: kind for name, kind in _KINDS.items() if name not in apart}), plain)
        except ContentError as error:
            raise PolicyError(f"the policy's settings do not fit: {error}") from error
        self._check_sizes()
        self._check_names()

    def _check_sizes(self) -> None:
        if self.hidden_dim % self.num_heads or (self.use_rope and self.hidden_dim // self.num_heads % 2):
            even = " into an even number each, which rotary positions need" if self.use_rope else ""
            raise PolicyError(
                f"hidden_dim must be divisible by num_heads{even}, got {self.hidden_dim} and {self.num_heads}"
            )
        if self.timestep_embed_dim % 2 or self.timestep_embed_dim < 4:
            raise PolicyError(f"timestep_embed_dim must be even, 4 or more, got {self.timestep_embed_dim}")
        end = self.n_obs_steps - 1 + self.n_action_steps
        if end > self.horizon:
            raise PolicyError(f"the executed slice ends at {end}, behind the horizon {self.horizon}")

    def _check_names(self) -> None:
        names = list(self.inputs)
        if len(names) < len(self.state) + len(self.vectors) + (self.encoder is not None and len(self.encoder.inputs)):
            raise PolicyError("two inputs of the policy have one name; give each its own")
        for name in names:
            if name in _TAKEN or not 1 <= len(name) <= 200:
                raise PolicyError(f"an input cannot be called {short(name)}; give it another name")
        if len({module_name(name) for name in names}) < len(names):
            raise PolicyError("two inputs of the policy have names that differ in dots alone; give them other names")

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The observation: shapes by name, without the batch."""
        moments = {name: (self.n_obs_steps, size) for name, size in self.state.items()}
        seen = {} if self.encoder is None else self.encoder.shapes(self.n_obs_steps)
        return {**moments, **seen, **{name: (size,) for name, size in self.vectors.items()}}

    @property
    def cond_dim(self) -> int:
        """Numbers of the conditioning vector."""
        encoded = 0 if self.encoder is None else self.encoder.features + self.hidden_dim
        return self.n_obs_steps * (sum(self.state.values()) + encoded) + sum(self.vectors.values())

    @property
    def executed(self) -> slice:
        """The tokens whose actions the robot executes."""
        return slice(self.n_obs_steps - 1, self.n_obs_steps - 1 + self.n_action_steps)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DiTConfig:
        refuse_unknown(cls, value)
        needed = [item.name for item in fields(cls) if item.default is item.default_factory is MISSING]
        required, optional = (
            {name: kind for name, kind in _KINDS.items() if (name in needed) is is_needed}
            for is_needed in (True, False)
        )
        try:
            return cls(**read(Fields(required, optional), value))
        except ContentError as error:
            raise PolicyError(f"the policy's settings do not fit: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        content = {"family": self.family, **asdict(self), "sampler": self.sampler.to_dict()}
        if self.encoder is None:
            del content["encoder"]
        return content


def module_name(name: str) -> str:
    """An input's name as torch takes it for a module's."""
    return name.replace(".", "_")
