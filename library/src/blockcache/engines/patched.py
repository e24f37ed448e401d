"""The reference engine: the user's own sampler and modules, with block outputs reused between update steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from blockcache.attach.generation import Generation, LayerCall, attach
from blockcache.attach.patching import Patches
from blockcache.attach.recorder import relative_change
from blockcache.engines.handle import Counts
from blockcache.models.port import Port
from blockcache.schedule import Plan, Reuse, Schedule, Strategy, compile_plan
from blockcache.solvers.teacache import TeaCacheRule


def follow(port: Port, strategy: Strategy, counts: Counts) -> Patches:
    """Patches that follow a strategy: compute blocks when it says so, and reuse what they added elsewhere."""
    if isinstance(strategy, TeaCacheRule):
        return attach(port, lambda: _RuleGeneration(strategy, port, counts), watched=True)
    assert isinstance(strategy, Schedule)
    plan = compile_plan(strategy)
    return attach(port, lambda: ScheduledGeneration(plan, counts), watched=True)


class ScheduledGeneration(Generation):
    """Computes what the plan says, and reuses the rest."""

    def __init__(self, plan: Plan, counts: Counts) -> None:
        self.reuse: Reuse[Tensor] = Reuse(plan)
        self.counts = counts
        self.computed: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def layer(self, call: LayerCall) -> Tensor:
        def route(name: str, compute: Callable[[], Tensor]) -> Tensor:
            def counted() -> Tensor:
                self.computed[name] += 1
                return compute()

            self.asked[name] += 1
            return self.reuse.block(call.step, name, counted)

        return call.routed(route)

    def finish(self) -> None:
        self.counts.add(self.computed, self.asked - self.computed)


class _RuleGeneration(Generation):
    """The decision is each sample's own. In a mixed batch all samples are computed and the reusing ones keep their old
    residual, so a sample's result does not depend on its neighbours; `counts` tells what each sample needed."""

    def __init__(self, rule: TeaCacheRule, port: Port, counts: Counts) -> None:
        self.rule = rule
        self.counts = counts
        self.names = [block.name for block in port.adapter.blocks]
        self.last = len(port.adapter.layers) - 1
        self.residual: Tensor | None = None  # (B, T, d), each sample's last computed one
        self.before: Tensor | None = None
        self.drift: Tensor  # (B,) estimated change since each sample's last computation
        self.compute: Tensor  # (B,) whether this step computes the sample
        self.entered: Tensor
        self.computed = self.reused = 0

    def layer(self, call: LayerCall) -> Tensor:
        if call.index == 0:
            self._decide(call.step, call.layer.first_input(call.stream))
            self.entered = call.stream
        out = call.plain() if bool(self.compute.any()) else call.stream
        if call.index < self.last:
            return out
        if self.residual is None:
            self.residual = out - self.entered
            return out
        chosen = self.compute[:, None, None]
        reused = self.entered + self.residual
        self.residual = torch.where(chosen, out - self.entered, self.residual)
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
