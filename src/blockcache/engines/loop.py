"""The whole denoising loop as a compiled plan in plain torch: exact savings, pre-summed residuals, constant sampler.

Any device and dtype. Inside the loop nothing is decided and nothing is copied to the host; shapes depend on the batch
size alone. Takes a CompiledPolicy and a Plan; knows nothing of policies or of where a schedule came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from blockcache.engines.compiled import BLOCKS_PER_LAYER, CompiledLayer, CompiledPolicy
from blockcache.schedule.plan import Compute, Plan, Run


class Memory(Protocol):
    """One generation's cross-attention keys and values."""

    def pair(self, layer: int, step: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer at a step, each (B, H, 1 + n_obs, d / H)."""
        ...


class Loop:
    """`loop(obs, noise)` -> actions in robot units. Several threads may call it at once.

    `new_memory` is how keys and values come about; the default is the fast one.
    """

    def __init__(
        self, policy: CompiledPolicy, plan: Plan, new_memory: Callable[[CompiledPolicy, Tensor], Memory] | None = None
    ) -> None:
        self.policy = policy
        self.plan = plan
        self.new_memory = new_memory or TabulatedMemory

    def start(self, obs: Tensor) -> Generation:
        """A generation of which the caller takes the steps itself."""
        return Generation(self.policy, self.plan, self.new_memory(self.policy, obs), len(obs))

    @torch.no_grad()
    def __call__(self, obs: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """obs (B, n_obs, obs) in robot units, noise (1 + draws, B, horizon, D)."""
        sampler = self.policy.sampler
        generation = self.start(obs)
        noise = noise[:, :, : self.policy.tokens]
        x, x0_prev, drawn = noise[0], None, 1
        for step in range(sampler.steps):
            out = generation.denoise(step, x)
            x0 = _mix(x, float(sampler.x0_x[step]), out, float(sampler.x0_out[step]))
            if sampler.clip is not None:
                x0 = x0.clamp(-sampler.clip, sampler.clip)
            after = _mix(x, float(sampler.a[step]), x0, float(sampler.b[step]))
            if sampler.e[step]:
                eps = _mix(x, float(sampler.eps_x[step]), out, float(sampler.eps_out[step]))
                after = after.add(eps, alpha=float(sampler.e[step]))
            if sampler.c[step]:
                assert x0_prev is not None
                after = after.add(x0_prev, alpha=float(sampler.c[step]))
            if sampler.draws[step]:
                after = after.add(noise[drawn], alpha=float(sampler.s[step]))
                drawn += 1
            x, x0_prev = after, x0
        return self.policy.finish(x)


class TabulatedMemory:
    """The observations are encoded and projected once per generation; the time token's share comes from the table."""

    def __init__(self, policy: CompiledPolicy, obs: Tensor) -> None:
        observed = policy.encode(obs @ policy.obs_w + policy.obs_b) @ policy.memory_w + policy.memory_b
        # all layers' keys and values, (layers * 2, B, H, 1 + n_obs, d / H); the time token's are filled in at each use
        self._memory = split_heads(policy, F.pad(observed, (0, 0, 1, 0)))
        self._time = split_heads(policy, policy.time_memory[:, None, :])[:, :, :, 0]  # (layers * 2, K, H, d / H)

    def pair(self, layer: int, step: int) -> tuple[Tensor, Tensor]:
        pair = self._memory[2 * layer : 2 * layer + 2]
        pair[:, :, :, 0] = self._time[2 * layer : 2 * layer + 2, step, None]
        return pair[0], pair[1]


class Generation:
    """One generation's state: keys and values, cached residuals, sums of runs."""

    def __init__(self, policy: CompiledPolicy, plan: Plan, memory: Memory, batch: int) -> None:
        self.policy = policy
        self.program, self.stale = plan.program, plan.stale
        self.memory = memory
        self.batch = batch
        self.positions = policy.input_b.repeat(batch, 1)  # (B * T, d)
        self.residuals = policy.input_b.new_empty((len(plan.blocks), batch * policy.tokens, policy.width))
        self.sums: dict[tuple[int, int], Tensor] = {}

    def denoise(self, step: int, x: Tensor) -> Tensor:
        """x (B, T, D) -> the denoiser's output (B, T, D)."""
        policy = self.policy
        stream = torch.addmm(self.positions, x.flatten(0, 1), policy.input_w)  # (B * T, d)
        for operation in self.program[step]:
            if isinstance(operation, Compute):
                residual = self._compute(operation.block, step, stream)
                if operation.keep:
                    self.residuals[operation.block] = residual
                stream = stream + residual
                continue
            if operation.parts:
                self.sums[operation.run] = self._sum(operation.parts)
            stream = stream + self._at_hand(operation.run)
        for run in self.stale[step]:
            del self.sums[run]
        return torch.addmm(policy.head_b, self._norm(stream), policy.head_w).view(self.batch, policy.tokens, -1)

    def _sum(self, parts: tuple[Run, ...]) -> Tensor:
        first, last = parts[0][0], parts[-1][1]
        if len(parts) == last - first + 1:  # single residuals only: they lie side by side
            return self.residuals[first : last + 1].sum(dim=0)
        total = self._at_hand(parts[0])
        for run in parts[1:]:
            total = total + self._at_hand(run)
        return total

    def _at_hand(self, run: Run) -> Tensor:
        return self.residuals[run[0]] if run[0] == run[1] else self.sums[run]

    def _compute(self, block: int, step: int, stream: Tensor) -> Tensor:
        index, place = divmod(block, BLOCKS_PER_LAYER)
        layer, normed = self.policy.layers[index], self._norm(stream)
        if place == 0:
            return self._self_attention(layer, normed)
        if place == 1:
            return self._cross_attention(layer, normed, index, step)
        hidden = F.gelu(torch.addmm(layer.up_b, normed, layer.up_w))
        return torch.addmm(layer.down_b, hidden, layer.down_w)

    def _self_attention(self, layer: CompiledLayer, normed: Tensor) -> Tensor:
        qkv = torch.addmm(layer.qkv_b, normed, layer.qkv_w)
        heads = qkv.view(self.batch, -1, 3, self.policy.heads, self.policy.head_size).permute(2, 0, 3, 1, 4)
        attended = self._attend(heads[0], heads[1], heads[2], self.policy.self_mask)
        return torch.addmm(layer.out_b, attended, layer.out_w)

    def _cross_attention(self, layer: CompiledLayer, normed: Tensor, index: int, step: int) -> Tensor:
        query = torch.addmm(layer.query_b, normed, layer.query_w)
        heads = query.view(self.batch, -1, self.policy.heads, self.policy.head_size).transpose(1, 2)
        attended = self._attend(heads, *self.memory.pair(index, step), self.policy.memory_mask)
        return torch.addmm(layer.cross_b, attended, layer.cross_w)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The scale is in the query already. (B, H, T, d / H) -> (B * T, d)."""
        scores = query @ keys.transpose(-1, -2)
        if mask is not None:
            scores = scores + mask
        return (scores.softmax(dim=-1) @ values).transpose(1, 2).reshape(-1, self.policy.width)

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.policy.width,), eps=self.policy.norm_eps)


def split_heads(policy: CompiledPolicy, memory: Tensor) -> Tensor:
    """(N, S, layers * 2d) -> (layers * 2, N, H, S, d / H)."""
    return memory.view(*memory.shape[:2], -1, policy.heads, policy.head_size).permute(2, 0, 3, 1, 4).contiguous()


def _mix(x: Tensor, x_weight: float, y: Tensor, y_weight: float) -> Tensor:
    return y * y_weight if x_weight == 0.0 else (x * x_weight).add(y, alpha=y_weight)
