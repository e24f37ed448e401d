"""The port of this package's own policies: everything is in the policy's config, whatever the family. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from blockcache.files import PathLike
from blockcache.models import checkpoint
from blockcache.models.modules import runs_known_code
from blockcache.models.own_policy import OwnPolicy
from blockcache.models.port import Port
from blockcache.models.sampling import Sampling
from blockcache.models.weights import check_action_scale, check_denoiser
from blockcache.observations.tensors import as_tensor
from blockcache.samplers import SamplerConfig

P = TypeVar("P", bound="OwnPort")


def _setting(name: str) -> Any:
    """A member of the port that is one of the config's."""
    return property(lambda port: getattr(port.policy.config, name))


class OwnPort(Port):
    """A family adds `action_scale` and, where there is more to it, what its observations look like."""

    reentrant = True
    takes_noise = True
    policy: Any
    sample_dim = _setting("sample_dim")
    inputs = _setting("inputs")
    cameras = _setting("cameras")
    task = _setting("task")

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling.of(self.policy.sampler)

    def with_sampler(self: P, sampler: SamplerConfig) -> P:
        return self._sharing_weights(self.policy.with_sampler(sampler))

    def prepare_observation(self, obs: Any) -> Any:
        if isinstance(obs, Mapping):
            return {name: as_tensor(value) for name, value in obs.items()}
        return as_tensor(obs) if len(self.inputs) == 1 else obs  # what is no mapping, `check` says in one sentence

    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        checked: dict[str, Tensor] = self.policy.check(obs)
        return checked

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        """Within the range of the data where there is a normaliser, frames from 0 to 1."""
        made, normalizer = super().synthetic_observations(count), getattr(self.policy, "normalizer", None)
        for name in made:
            if name in self.cameras:
                made[name] = torch.rand(made[name].shape)
            elif normalizer is not None and self.is_normalised(name):
                made[name] = normalizer.field(name).unnormalize(made[name].to(self.policy.like))
        return made

    def is_normalised(self, name: str) -> bool:
        """Whether an input of a policy with a normaliser goes through it."""
        return True

    @property
    def trusted(self) -> bool:
        outside = {part for module in self.parts_outside_program for part in module.modules()}
        inside = [part for part in self.policy.modules() if part not in outside]
        return runs_known_code(inside, type(self.policy.config))

    def check_weights(self) -> None:
        outside = {part for module in self.parts_outside_program for part in module.modules()}
        for part in self.policy.children():
            if part not in outside:
                check_denoiser(part)
        if (normalizer := getattr(self.policy, "normalizer", None)) is not None:
            check_action_scale(normalizer.action.scale)

    def settings(self) -> list[Any]:
        return [self.policy.config]

    def save(self, directory: PathLike) -> bool:
        assert isinstance(self.policy, OwnPolicy)
        checkpoint.save(self.policy, directory)
        return True
