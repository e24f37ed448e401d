"""What the ports of our own policies have in common, whatever the family: everything is in the policy's config.

Knows no family. DP-T's own port is not one of these: that policy has the public interface, and its port says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from blockcache.files import PathLike
from blockcache.models.port import Port
from blockcache.samplers import SamplerConfig, table

P = TypeVar("P", bound="ConfiguredPort")


class ConfiguredPort(Port):
    """A policy with a `config` (inputs, sampler, task), `check` and `with_sampler`; a scheduler for each generation."""

    reentrant = True
    takes_noise = True

    @cached_property
    def timesteps(self) -> tuple[float, ...]:
        return tuple(table(self.sampler).timesteps.tolist())

    @property
    def sampler(self) -> SamplerConfig:
        sampler: SamplerConfig = self.policy.config.sampler
        return sampler

    @property
    def sampler_settings(self) -> Mapping[str, Any]:
        return self.sampler.to_dict()

    def with_sampler(self: P, sampler: SamplerConfig) -> P:
        return self._sharing_weights(self.policy.with_sampler(sampler))

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        inputs: Mapping[str, tuple[int, ...]] = self.policy.config.inputs
        return inputs

    @property
    def task(self) -> str | None:
        task: str | None = self.policy.config.task
        return task

    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        checked: dict[str, Tensor] = self.policy.check(obs)
        return checked

    def settings(self) -> list[Any]:
        return [self.policy.config]

    @abstractmethod
    def save(self, directory: PathLike) -> bool:
        """Ours can always be saved."""
