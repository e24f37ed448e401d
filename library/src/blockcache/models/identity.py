"""Which policy a port is of: its fingerprint, the hash of its weights, and copies that need not find these out again."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from blockcache.fingerprint import Fingerprint
from blockcache.models.adapter import Adapter
from blockcache.models.modules import checksum, memory, tensors_of, versions, weights_hash
from blockcache.models.sampling import Sampling

P = TypeVar("P", bound="Identified")


class Identified(ABC):
    """What a port knows of its policy's identity."""

    def __init__(self, policy: Any, adapter: Adapter) -> None:
        self.policy = policy
        self.adapter = adapter
        self.module: nn.Module = policy if isinstance(policy, nn.Module) else adapter.denoiser
        """What holds the weights: the policy, or its denoiser where the policy is no module."""
        self._hashed: tuple[Any, str] | None = None  # what the weights were recognised by, and their hash

    @property
    @abstractmethod
    def sampling(self) -> Sampling:
        """Sampler and timesteps."""

    @property
    def timesteps(self) -> tuple[float, ...]:
        return self.sampling.timesteps

    @property
    def weights(self) -> str:
        """The weights' hash, taken at the first need and kept until a tensor changes: at 0.7 GB/s it is no small thing."""
        seen = self._recognised()
        if self._hashed is None or self._hashed[0] != seen:
            self._hashed = seen, weights_hash(self.module)
        return self._hashed[1]

    def _recognised(self) -> tuple[list[tuple[int, int]], int]:
        """Read faster than it is hashed; the bytes too, since torch does not count what is written through `.data`."""
        tensors = tensors_of(self.module)
        return versions(tensors), checksum(map(memory, tensors))

    def _with_weights_of(self: P, known: str | None) -> P:
        """Take over a hash that was taken of the very same weights."""
        if known is not None:
            self._hashed = self._recognised(), known
        return self

    @property
    def _known_weights(self) -> str | None:
        return None if self._hashed is None else self.weights

    @cached_property
    def shape(self) -> Fingerprint:
        """The fingerprint without the weights."""
        return Fingerprint(
            family=self.adapter.family,
            blocks=tuple(block.name for block in self.adapter.blocks),
            widths=self.adapter.widths,
            steps=len(self.timesteps),
            sampler=dict(self.sampling.settings),
        )

    @property
    def fingerprint(self) -> Fingerprint:
        return replace(self.shape, weights=self.weights)

    def copy(self: P) -> P:
        """An independent copy, weights and all; what is known of them is not found out again."""
        return copy.deepcopy(self)

    def _sharing_weights(self: P, policy: Any) -> P:
        """A port of `policy`, which has the weights of this one."""
        return type(self)(policy, self.adapter)._with_weights_of(self._known_weights)

    def __reduce__(self) -> tuple[Callable[..., Identified], tuple[Any, ...]]:
        """For copies and workers: the policy travels, and is looked at again where it arrives."""
        return _reopened, (self.policy, self._known_weights)


def _reopened(policy: Any, weights: str | None) -> Identified:
    from blockcache.models.registry import port_of

    return port_of(policy)._with_weights_of(weights)
