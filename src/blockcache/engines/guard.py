"""Notices that weights were changed after an engine had copied them. Cheap enough for every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import StaleWeightsError

PROBES = 16


class WeightsGuard:
    """Remembers which tensors a policy holds, their version counters, and a few of their values.

    The counters see every edit that torch knows of, `load_state_dict` and optimisers among them. Writes that go around
    it through `.data` are seen by the values, of which up to 16 per tensor are compared, spread evenly: enough for any
    edit of whole tensors, such as a switch to EMA weights.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._tensors = self._held()
        self._versions = self._state(self._tensors)
        self._values = self._probe(self._tensors)

    def check(self) -> None:
        held = self._held()
        same = [tensor is before for tensor, before in zip(held, self._tensors, strict=False)]
        if (
            len(held) != len(self._tensors)
            or not all(same)
            or self._state(held) != self._versions
            or not torch.equal(self._probe(held), self._values)
        ):
            raise StaleWeightsError(
                "the policy's weights changed after this engine had copied them; disable() and accelerate again"
            )

    def _held(self) -> list[Tensor]:
        module: nn.Module = self._policy if isinstance(self._policy, nn.Module) else self._policy.model
        return [*module.parameters(), *module.buffers()]

    @staticmethod
    def _state(tensors: list[Tensor]) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for tensor in tensors]

    @staticmethod
    def _probe(tensors: list[Tensor]) -> Tensor:
        flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
        return torch.cat([values[:: max(1, len(values) // PROBES)][:PROBES].to(torch.float64) for values in flat])
