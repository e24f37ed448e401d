"""How an upstream FFN's error arrives in a downstream FFN that is computed in full: over the steps, and scaled at one step.

Knows nothing of what the blocks are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.attach.generation import Generation, LayerCall
from blockcache.block import FEED_FORWARD
from blockcache.models.port import Port
from blockcache.results.analysis_section import AnalysisError
from blockcache.results.analysis_sections import Correlation
from blockcache.schedule import Schedule
from blockcache_lab.analysis.caching import caching_error
from blockcache_lab.analysis.residuals import everything, relative, run

BETAS = tuple(float(beta) for beta in np.linspace(0, 2, 9))


def ffns_of(port: Port) -> list[str]:
    """The names of the FFN blocks, in execution order."""
    return [block.name for block in port.adapter.blocks if block.kind == FEED_FORWARD]


def error_correlation(
    port: Port,
    observations: Sequence[Any],
    seed: int = 0,
    *,
    upstream: str | None = None,
    downstream: str | None = None,
    step: int | None = None,
    betas: Sequence[float] = BETAS,
    progress: str | None = None,
) -> Correlation:
    """The upstream block reuses its first output at all steps, everything else is computed.

    port                  the policy
    observations          batches; the first of them serves for the betas
    seed                  of the noise
    upstream, downstream  blocks; the last two FFNs unless named
    step                  where the error is scaled; the middle one unless given
    betas                 by what: 0 is the true output, 1 the one that is reused
    progress              the words before a bar, if there is to be one
    """
    ffns, full = ffns_of(port), everything(port)
    if len(ffns) < 2 and (upstream is None or downstream is None):
        raise AnalysisError(f"The policy has {len(ffns)} FFN, and errors correlate between two of them.")
    if full.steps < 2:
        raise AnalysisError("The policy has 1 step, so that nothing is ever reused.")
    upstream, downstream = upstream or ffns[-2], downstream or ffns[-1]
    for name in (upstream, downstream):
        if name not in full.blocks:
            raise AnalysisError(f"no block {name!r}, the policy's are {full.blocks[0]} to {full.blocks[-1]}")
    reused = Schedule(full.steps, {**full.updates, upstream: (0,)})
    errors = caching_error(port, reused, observations, seed, progress).errors  # (blocks, K)
    step = full.steps // 2 if step is None else step
    if not 0 < step < full.steps:
        raise AnalysisError(f"the step must be from 1 to {full.steps - 1}, got {step}; at step 0 nothing is reused")
    scaled = [_Scaled(upstream, downstream, step, beta) for beta in (0.0, *betas)]
    for generation in scaled:
        run(port, generation, observations[0], seed)
    true, *others = scaled
    return Correlation(
        upstream,
        downstream,
        errors[full.blocks.index(upstream), 1:],
        errors[full.blocks.index(downstream), 1:],
        step,
        np.array(betas),
        np.array([_error(item.upstream, true.upstream) for item in others]),
        np.array([_error(item.downstream, true.downstream) for item in others]),
    )


def _error(found: Tensor, expected: Tensor) -> float:
    return float(relative(found, expected).mean())


class _Scaled(Generation):
    """Everything is computed, but at one step the upstream block adds b + beta (b of step 0 - b)."""

    def __init__(self, upstream: str, downstream: str, step: int, beta: float) -> None:
        self._names, self._step, self._beta = (upstream, downstream), step, beta
        self._first: Tensor
        self.upstream = self.downstream = torch.empty(0)

    def layer(self, call: LayerCall) -> Tensor:
        upstream, downstream = self._names

        def route(name: str, compute: Callable[[], Tensor]) -> Tensor:
            added = compute()
            if name == upstream and call.step == 0:
                self._first = added
            if call.step == self._step and name == upstream:
                self.upstream = added = added + self._beta * (self._first - added)
            if call.step == self._step and name == downstream:
                self.downstream = added
            return added

        return call.routed(route)
