"""The base of this package's own policies: config, sampler, noise, sizes, the frame of `predict_action`, and their port.

A family adds its sizes and its denoiser, and says how an observation becomes what the denoiser is given. Knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.errors import ContentError, PolicyError, short, shortened
from blockcache.files import Fields, Limit, Name, PathLike, keys_of, read
from blockcache.models.modules import check_action_scale, check_denoiser, refuse_overridden, runs_known_code
from blockcache.models.port import Port
from blockcache.models.sampling import Sampling, denoise, draw_all
from blockcache.observations.tensors import Observation, as_tensor
from blockcache.samplers import DDPM, Guide, SamplerConfig, table
from blockcache_runtime.chunks import EXECUTION_HORIZON, LATENCY, PREVIOUS_CHUNK, Previous, prefix_weights

Size: TypeAlias = Annotated[int, Limit(1, 100_000)]
Depth: TypeAlias = Annotated[int, Limit(1, 1_000)]
_NESTED = {"sampler": "a sampler's config", "encoder": "an encoder's config"}
NOT_ACTIONS_ALONE = (
    "a chunk can be told of the one before it only if the policy denoises actions alone, and this one in-paints its "
    "observations"
)
C = TypeVar("C", bound="PolicyConfig")
P = TypeVar("P", bound="OwnPolicy")
Q = TypeVar("Q", bound="OwnPort")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What a policy directory's `config.json` says: its keys are the fields, whose annotations say what each may hold.

    task, weights, training: for the record.
    """

    FAMILY: ClassVar[str]
    action_dim: Size
    horizon: Size
    n_obs_steps: Size
    n_action_steps: Size
    sampler: SamplerConfig = field(default_factory=DDPM)
    family: str
    task: Name | None = None
    weights: Name | None = None
    training: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_family(self.family)
        own: Any = type(self)
        kinds = keys_of(own)
        for name, wanted in _NESTED.items():
            if name in kinds and not isinstance(getattr(self, name), kinds[name]):
                raise PolicyError(f"policy setting {name} must be {wanted}, got {short(getattr(self, name))}")
        plain = {name: kind for name, kind in kinds.items() if name not in _NESTED}
        _fitting(Fields(plain), {name: getattr(self, name) for name in plain})
        if self.executed.stop > self.horizon:
            raise PolicyError(f"the executed slice ends at {self.executed.stop}, behind the horizon {self.horizon}")

    @classmethod
    def _check_family(cls, family: Any) -> None:
        if family != cls.FAMILY:
            raise PolicyError(f"this reads policies of family {cls.FAMILY!r}, got {short(family)}")

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The observation: shapes by name, without the batch."""
        raise NotImplementedError

    @property
    def cameras(self) -> tuple[str, ...]:
        """Which of the inputs are frames."""
        return ()

    @property
    def sample_dim(self) -> int:
        """Numbers per token of the noise."""
        return self.action_dim

    @property
    def executed(self) -> slice:
        """The tokens whose actions the robot executes."""
        return slice(self.n_obs_steps - 1, self.n_obs_steps - 1 + self.n_action_steps)

    @property
    def least_weights(self) -> tuple[int, int, int]:
        """Layers, tensors of each layer, and numbers in all tensors: lower bounds of what the weights hold."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls: type[C], value: Mapping[str, Any]) -> C:
        """From a config file; whatever is missing, unknown or of another type is refused."""
        own: Any = cls
        kinds = keys_of(own)
        if unknown := sorted(set(value) - set(kinds)):
            names = shortened(", ".join(unknown), 100)
            raise PolicyError(f"unknown policy settings {names}; known are {', '.join(sorted(kinds))}")
        cls._check_family(value.get("family", cls.FAMILY))
        needed = {item.name for item in fields(cls) if item.default is item.default_factory is MISSING} | {"sampler"}
        required = {name: kind for name, kind in kinds.items() if name in needed}
        optional = {name: kind for name, kind in kinds.items() if name not in needed}
        return cls(**_fitting(Fields(required, optional), value))

    def to_dict(self) -> dict[str, Any]:
        content = {**asdict(self), "sampler": self.sampler.to_dict()}
        if content.get("encoder", ...) is None:
            del content["encoder"]
        return content


def _fitting(kinds: Fields, value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return read(kinds, value)
    except ContentError as error:
        raise PolicyError(f"the policy's settings do not fit: {error}") from error


def _setting(path: str) -> Any:
    """An attribute that is one of the config's, and cannot be set."""
    return property(attrgetter(path))


class OwnPolicy(nn.Module):
    """Observations in, a chunk of actions out. Several threads may call it at once: each generation has its scheduler."""

    CONFIG: ClassVar[type[PolicyConfig]]
    config: Any
    horizon: int = _setting("config.horizon")
    n_obs_steps: int = _setting("config.n_obs_steps")
    n_action_steps: int = _setting("config.n_action_steps")
    action_dim: int = _setting("config.action_dim")
    sampler: SamplerConfig = _setting("config.sampler")
    cameras: tuple[str, ...] = _setting("config.cameras")

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def random(cls: type[P], config: PolicyConfig, seed: int = 0) -> P:
        """A policy with random weights, always the same ones for one seed, in eval mode."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return cls(config).eval()

    @classmethod
    def unfilled(cls: type[P], config: PolicyConfig) -> P:
        """A policy whose weights are about to be loaded."""
        return cls(config)

    @property
    def stored(self) -> nn.Module:
        """What holds the tensors of a policy directory, under their names."""
        return self

    @property
    def like(self) -> Tensor:
        """A tensor with the policy's precision and device."""
        raise NotImplementedError

    def with_sampler(self: P, sampler: SamplerConfig) -> P:
        """The same weights (shared, not copied) behind another sampler."""
        return self._with(sampler=sampler)

    def _with(self: P, **changes: Any) -> P:
        """The same weights behind other settings."""
        refuse_overridden([("", self)], "a copy with other settings")
        other = type(self).__new__(type(self))
        nn.Module.__init__(other)
        other.config = replace(self.config, **changes)
        for name, module in self._modules.items():  # those that are None too
            other.add_module(name, module)
        vars(other)["training"] = vars(self)["training"]  # its own flag only: the shared modules keep theirs
        return other

    def draw_noise(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """All the noise of one generation, (1 + draws, B, horizon, D), exactly as `generator` would give it."""
        return draw_all(table(self.sampler), (batch, self.horizon, self.config.sample_dim), self.like, generator)

    @torch.no_grad()
    def predict_action(
        self,
        obs: Observation,
        *,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        previous: Previous | None = None,
    ) -> dict[str, Tensor]:
        """One generation: action (B, n_action_steps, A) and action_pred (B, horizon, A), in robot units.

        Args:
            obs: arrays (B, ...) by the names and shapes of the config's `inputs`; cameras as uint8 or as floats from 0 to 1.
                A policy with one input takes a bare array as well.
            generator: draws the noise, torch's global one without it.
            noise: all of it, as `draw_noise` gives it, instead of a generator.
            previous: the chunk before, for the new one to go on from it (real-time chunking).
        """
        observed = self.check(obs)
        conditions = self.encode(observed)
        sample = denoise(
            self.sampler,
            lambda x, t: self.denoiser_output(x, t, conditions),
            (len(next(iter(observed.values()))), self.horizon, self.config.sample_dim),
            self.like,
            generator=generator,
            noise=noise,
            constrain=lambda x: self.constrain(x, conditions),
            guide=None if previous is None else self._guide(previous, len(next(iter(observed.values())))),
        )
        actions = self.actions(sample, observed)
        return {"action": actions[:, self.config.executed], "action_pred": actions}

    def _guide(self, previous: Previous, batch: int) -> Guide[Tensor]:
        """The chunk before, normalised, over all tokens of the new one."""
        if self.config.sample_dim != self.action_dim:
            raise PolicyError(NOT_ACTIONS_ALONE)
        before = self.config.executed.start
        told = previous.inputs(batch, self.horizon - before, self.action_dim)
        known = torch.from_numpy(told[PREVIOUS_CHUNK]).to(self.like)
        normalizer = getattr(self, "normalizer", None)
        weights = torch.from_numpy(prefix_weights(told[LATENCY], told[EXECUTION_HORIZON], known.shape[1])).to(self.like)
        pull, aim = weights[..., None], known if normalizer is None else normalizer.action.normalize(known)
        pull, aim = (F.pad(value, (0, 0, before, 0)) for value in (pull, aim * pull))
        return Guide(pull, 1 - pull, aim)

    def check(self, obs: Any) -> dict[str, Tensor]:
        """The observation by its inputs' names, in robot units, or a sentence saying what is wrong with it."""
        raise NotImplementedError

    def encode(self, observed: Mapping[str, Tensor]) -> Any:
        """What the denoiser is given throughout a generation, from a checked observation."""
        raise NotImplementedError

    def denoiser_output(self, x: Tensor, t: Tensor, conditions: Any) -> Tensor:
        """The denoiser's output for a sample at a timestep."""
        raise NotImplementedError

    def constrain(self, x: Tensor, conditions: Any) -> Tensor:
        """The sample with what of it is known put in place; before every step and at the end."""
        return x

    def actions(self, sample: Tensor, observed: Mapping[str, Tensor]) -> Tensor:
        """The clean sample as actions in robot units, (B, horizon, A)."""
        raise NotImplementedError


class OwnPort(Port):
    """The port of such a policy, whose config says everything; a family may add what its observations look like."""

    reentrant = True
    takes_noise = True
    policy: Any
    sample_dim = _setting("policy.config.sample_dim")
    inputs = _setting("policy.config.inputs")
    cameras = _setting("policy.config.cameras")
    task = _setting("policy.config.task")

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling.of(self.policy.sampler)

    def with_sampler(self: Q, sampler: SamplerConfig) -> Q:
        return self._sharing_weights(self.policy.with_sampler(sampler))

    def executing(self: Q, actions: int) -> Q:
        return self._sharing_weights(self.policy._with(n_action_steps=actions))

    @property
    def _normalizer(self) -> Any:
        return getattr(self.policy, "normalizer", None)

    @property
    def action_scale(self) -> NDArray[np.float64]:
        return np.ones(self.policy.action_dim) if self._normalizer is None else self._normalizer.action.affine()[0]

    @property
    def action_offset(self) -> NDArray[np.float64]:
        return np.zeros(self.policy.action_dim) if self._normalizer is None else self._normalizer.action.affine()[1]

    def prepare_observation(self, obs: Any) -> Any:
        bare = not isinstance(obs, Mapping) and len(self.inputs) == 1
        return as_tensor(obs) if bare else super().prepare_observation(obs)

    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        return self.policy.check(obs)

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        """Within the range of the data where there is a normaliser, frames from 0 to 1."""
        made = super().synthetic_observations(count)
        for name in made:
            if name in self.cameras:
                made[name] = torch.rand(made[name].shape)
            elif self._normalizer is not None and name in self._normalizer.sizes:
                made[name] = self._normalizer.field(name).unnormalize(made[name].to(self.policy.like))
        return made

    @property
    def trusted(self) -> bool:
        outside = {part for module in self.parts_outside_program for part in module.modules()}
        inside = [part for part in self.policy.modules() if part not in outside]
        return runs_known_code(inside, type(self.policy.config))

    def check_weights(self) -> None:
        for part in self.policy.children():
            if part not in self.parts_outside_program:
                check_denoiser(part)
        if self._normalizer is not None:
            check_action_scale(self._normalizer.action.scale)

    def settings(self) -> list[Any]:
        return [self.policy.config]

    def save(self, directory: PathLike) -> bool:
        from blockcache.models import checkpoint

        checkpoint.save(self.policy, directory)
        return True
