"""Notices that weights were changed after an engine had copied them. Cheap enough for every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import StaleWeightsError
from blockcache.models.port import versions

PROBES = 16


class WeightsGuard:
    """Remembers which modules and tensors a policy holds, the tensors' version counters, and a few of their values.

    The counters see every edit that torch knows of, `load_state_dict` and optimisers among them. Writes that go around
    it through `.data` are seen by the values, of which up to 16 per tensor are compared, spread evenly: enough for any
    edit of whole tensors, such as a switch to EMA weights.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._held: list[tuple[Mapping[str, Any], str, Any]] = [
            (registry, name, value)
            for module in policy.modules()
            for registry in (module._modules, module._parameters, module._buffers)
            for name, value in registry.items()
        ]
        self._tensors = [*policy.parameters(), *policy.buffers()]
        self._versions = versions(self._tensors)
        views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self._tensors:
            views.setdefault((tensor.dtype, tensor.device), []).append(_spread(tensor))
        self._views = list(views.values())
        self._values = self._probe()

    def check(self) -> None:
        # in this order: views are worth a look only while the tensors are where they were
        if not (self._holds_the_same() and versions(self._tensors) == self._versions and self._probe() == self._values):
            raise StaleWeightsError(
                "the policy's weights changed after this engine had copied them; disable() and accelerate again"
            )

    def _holds_the_same(self) -> bool:
        return all(registry.get(name) is value for registry, name, value in self._held)

    def _probe(self) -> list[bytes]:
        """Bytes, since NaN is not equal to itself; an unused statistic may well be NaN."""
        return [torch.cat(views).cpu().view(torch.uint8).numpy().tobytes() for views in self._views]


def _spread(tensor: Tensor) -> Tensor:
    """A view of up to 16 values, spread over the memory that the tensor takes."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    every = max(1, span // PROBES)
    count = min(PROBES, -(-span // every)) if tensor.numel() else 0
    return tensor.detach().as_strided((count,), (every,), tensor.storage_offset())
