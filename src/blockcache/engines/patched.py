"""The reference engine: the user's own sampler and modules, with block outputs reused between update steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from blockcache.attach.generation import attach
from blockcache.attach.patching import Patches
from blockcache.attach.recorder import relative_change
from blockcache.engines.stats import Counts
from blockcache.models.adapter import Layer
from blockcache.models.port import Target
from blockcache.schedule import Schedule
from blockcache.schedule.plan import compile_plan
from blockcache.solvers.teacache import Rule


def attach_schedule(target: Target, schedule: Schedule, counts: Counts) -> Patches:
    """Compute each block at its update steps; elsewhere add its last residual again."""
    plan = compile_plan(schedule)
    due = tuple(plan.due(step) for step in range(plan.steps))
    return attach(target, lambda: _ScheduledRun(due, counts))


def attach_rule(target: Target, rule: Rule, counts: Counts) -> Patches:
    """Recompute the whole stack for a sample when TeaCache's rule says so; elsewhere add its last residual again."""
    return attach(target, lambda: _RuleRun(rule, target, counts))


class _ScheduledRun:
    def __init__(self, due: tuple[frozenset[str], ...], counts: Counts) -> None:
        self.due = due
        self.counts = counts
        self.cache: dict[str, Tensor] = {}
        self.now: frozenset[str] = frozenset()
        self.computed: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()

    def layer(
        self, step: int, index: int, layer: Layer, original: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        self.now = self.due[step]
        return layer.forward(self._route, *args, **kwargs)

    def _route(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        if name in self.now:
            self.computed[name] += 1
            self.cache[name] = compute()
        else:
            self.reused[name] += 1
        return self.cache[name]

    def finish(self) -> None:
        self.counts.add(self.computed, self.reused)


class _RuleRun:
    """The decision is each sample's own. In a mixed batch all samples are computed and the reusing ones keep their old
    residual, so a sample's result does not depend on its neighbours; `counts` tells what each sample needed."""

    def __init__(self, rule: Rule, target: Target, counts: Counts) -> None:
        self.rule = rule
        self.counts = counts
        self.names = [block.name for block in target.adapter.blocks]
        self.last = len(target.adapter.layers) - 1
        self.residual: Tensor | None = None  # (B, T, d), each sample's last computed one
        self.before: Tensor | None = None
        self.drift: Tensor  # (B,) estimated change since each sample's last computation
        self.compute: Tensor  # (B,) whether this step computes the sample
        self.entered: Tensor
        self.computed = self.reused = 0

    def layer(
        self,
        step: int,
        index: int,
        layer: Layer,
        original: Callable[..., Tensor],
        x: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if index == 0:
            self._decide(step, layer.first_input(x))
            self.entered = x
        any_computed = bool(self.compute.any())
        out = original(x, *args, **kwargs) if any_computed else x
        if index < self.last:
            return out
        if self.residual is None:
            self.residual = out - self.entered
            return out
        chosen = self.compute[:, None, None]
        fresh = out - self.entered
        reused = self.entered + self.residual
        self.residual = torch.where(chosen, fresh, self.residual)
        return torch.where(chosen, out, reused)

    def _decide(self, step: int, value: Tensor) -> None:
        if self.before is None or step == self.rule.steps - 1:
            self.compute = torch.ones(len(value), dtype=torch.bool, device=value.device)
            self.drift = torch.zeros(len(value), dtype=torch.float64, device=value.device)
        else:
            self.drift = self.drift + self._estimate(relative_change(value, self.before).to(torch.float64))
            self.compute = ~(self.drift < self.rule.threshold)  # with threshold 0, or NaN, everything is computed
            self.drift = torch.where(self.compute, torch.zeros_like(self.drift), self.drift)
        self.before = value
        samples = int(self.compute.sum())
        self.computed += samples
        self.reused += len(value) - samples

    def _estimate(self, change: Tensor) -> Tensor:
        estimate = torch.zeros_like(change)
        for coefficient in self.rule.coefficients:  # Horner's scheme
            estimate = estimate * change + coefficient
        return estimate.abs()  # far from its data the polynomial may turn negative; drift only grows

    def finish(self) -> None:
        counted: Mapping[str, int] = dict.fromkeys(self.names, self.computed)
        self.counts.add(counted, dict.fromkeys(self.names, self.reused))
