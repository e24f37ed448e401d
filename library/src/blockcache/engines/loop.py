"""The loop engine: the walk on the torch backend, which executes operations, on the program's device and in its precision.

Nothing is copied to the host, shapes depend on the batch size alone. Knows nothing of policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from blockcache.attach.generation import LargestNorm
from blockcache.engines.walk import generate
from blockcache.models.program import Activation, Program, StepTable
from blockcache.models.sampling import TorchArithmetic
from blockcache.observations.tensors import largest
from blockcache.samplers import SamplerTable
from blockcache.schedule.plan import Plan
from blockcache_runtime.checks import check_generation

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "cos": torch.cos,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "mish": F.mish,
    "relu": F.relu,
    "silu": F.silu,
    "sin": torch.sin,
}


class Loop:
    """`loop(obs, noise)` -> actions in robot units. Several threads may call it at once."""

    def __init__(self, program: Program, plan: Plan, sampler: SamplerTable) -> None:
        self.program = program
        self.plan = plan
        self.sampler = sampler
        self.constants = Constants(program)

    def __call__(self, obs: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        """obs by name, each (B, ...), in robot units; noise (1 + draws, B, T, D)."""
        found = self.unchecked(obs, noise)
        seen = [found.pop(name) for name in ("norms", "features") if name in found]
        check_generation(largest(seen), lambda: largest(obs))
        return found

    @torch.no_grad()
    def unchecked(self, obs: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        """The same with `norms`, at which nobody has looked yet: nothing is copied to the host."""
        backend = TorchBackend(self.constants, noise.shape[1])
        return generate(backend, self.program, self.plan, self.sampler, by_moment(obs, self.program), noise)


def by_moment(obs: Mapping[str, Tensor], program: Program) -> dict[str, Tensor]:
    """As the walk takes an observation: of cameras the moments come before the batch.

    Args:
        obs: The observation by the program's input names, each (B, ...).
        program: Says which inputs are cameras.
    """
    return {name: value.transpose(0, 1) if name in program.cameras else value for name, value in obs.items()}


class Constants:
    """A program's weights, and its tables with their zeros filled in. Made once, used by every generation."""

    def __init__(self, program: Program) -> None:
        self.weights: Mapping[str, Tensor] = program.weights
        self.tables = {name: _filled(table) for name, table in program.tables.items()}


def _filled(table: StepTable) -> Tensor:
    """(K, parts, *shape)."""
    pads = [size for after in reversed(table.pads) for size in (0, after)]
    values = F.pad(table.values, pads) if any(pads) else table.values
    return values.reshape(*values.shape[:2], *table.shape)


class TorchBackend(TorchArithmetic):
    """The operations for one generation of `batch` samples; see `models.program.Ops` for what each does."""

    def __init__(self, constants: Constants, batch: int) -> None:
        self._weights, self._tables = constants.weights, constants.tables
        self._batch = batch
        self._watch = LargestNorm()

    def weight(self, name: str) -> Tensor:
        return self._weights[name]

    def row(self, table: str, step: int, part: int = 0) -> Tensor:
        return self._tables[table][step, part]

    def per_sample(self, value: Tensor) -> Tensor:
        return value.repeat(self._batch, 1)

    def linear(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x, w)

    def grouped(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def add(self, values: Sequence[Tensor]) -> Tensor:
        if len(values) > 3 and len({value.shape for value in values}) == 1:  # residuals: one reduction, not a chain
            return torch.stack(list(values)).sum(dim=0)
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    def layer_norm(self, x: Tensor, width: int, eps: float) -> Tensor:
        return F.layer_norm(x, (width,), eps=eps)

    def scale_norm(self, x: Tensor, width: int, eps: float, centred: bool) -> Tensor:
        if not centred:
            return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        unbiased = (width - 1) / width  # torch's layer norm finds the spread in half the time that its `var` takes
        _, _, spread = torch.native_layer_norm(x, (width,), None, None, eps * unbiased)
        return x * (spread * math.sqrt(unbiased))

    def activation(self, x: Tensor, kind: Activation) -> Tensor:
        return _ACTIVATIONS[kind](x)

    def softmax(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: str | None = None, causal: bool = False
    ) -> Tensor:
        batch, tokens, width = q.shape
        q, k, v = (item.view(batch, -1, heads, width // heads).transpose(1, 2) for item in (q, k, v))
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores + self._weights[mask]
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, tokens, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k.transpose(-1, -2), v, attn_mask=hidden, scale=1.0)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.reshape(*shape)

    def transpose(self, x: Tensor, order: Sequence[int]) -> Tensor:
        return x.permute(*order)

    def split(self, x: Tensor, parts: int, axis: int) -> list[Tensor]:
        return list(x.chunk(parts, dim=axis))

    def slice(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        return x.narrow(axis, start, stop - start)

    def pad(self, x: Tensor, axis: int, before: int) -> Tensor:
        return F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [before, 0])

    def concat(self, values: Sequence[Tensor], axis: int) -> Tensor:
        return values[0] if len(values) == 1 else torch.cat(list(values), dim=axis)

    def conv(self, x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
        return F.conv2d(x, w, stride=stride, padding=padding)

    def group_norm(self, x: Tensor, gain: str, bias: str, groups: int, eps: float, sides: tuple[int, int]) -> Tensor:
        return F.group_norm(x, groups, self._weights[gain], self._weights[bias], eps)

    def max_pool(self, x: Tensor, size: int, stride: int, padding: int) -> Tensor:
        return F.max_pool2d(x, size, stride, padding)

    def scaled_noise(self, noise: Tensor, scales: Sequence[float], tokens: int) -> list[Tensor]:
        factors = torch.tensor(scales, dtype=noise.dtype, device=noise.device).view(-1, 1, 1, 1)
        return list((noise[:, :, :tokens] * factors).flatten(1, 2))

    def repeat(self, body: Any, sampler: Any, noise: Any) -> None:
        return None

    def pull(self, delay: Tensor, overlap: Tensor, before: int, tokens: int) -> tuple[Tensor, Tensor]:
        place = torch.arange(tokens - before, device=delay.device)
        weights = ((overlap[:, None] - place) / (overlap - delay + 1)[:, None]).clamp(0, 1)
        pull = F.pad(weights, (before, 0)).reshape(-1, 1)
        return pull, 1 - pull

    def watch(self, stream: Tensor, output: Tensor) -> None:
        self._watch.see(stream)
        self._watch.see(output)

    def norms(self, actions: Tensor) -> Tensor:
        self._watch.see(actions)
        return self._watch.largest()
