"""Calibrate: run the policy in full and record how each block's output changes over the steps.

All K features of a block are held for one generation, reduced to K x K matrices and dropped; only averages remain.
Knows nothing of tasks, solvers or plots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.attach.action_costs import ActionCostCollector
from blockcache.attach.generation import Generation, LayerCall, attach
from blockcache.attach.walk_back import DenoiserCall
from blockcache.errors import ObservationError, RecordingError
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.models.sampling import generate
from blockcache.observations import batch_size, rows
from blockcache.progress import progress_bar
from blockcache.solvers.recording import METRICS, Recording

FEATURE_BYTES = 100 * 2**20
"""Features held at once; larger batches of observations are run in parts."""


def calibrate(
    policy: Any,
    observations: Iterable[Any],
    generations: int | None = None,
    *,
    seed: int = 0,
    action_costs: bool = False,
    progress: bool = True,
) -> Recording:
    """Record how each block's output changes over the steps. The policy runs unchanged and comes back unchanged.

    Args:
        policy: The policy object of any family, or its port.
        observations: Batches as the policy takes them: one generation is recorded for each.
        generations: At most so many of them; all without it.
        seed: The noise depends on it alone.
        action_costs: Whether to record as well what reusing each block does to the executed action, for `solve` with
            method="action"; the denoiser must be differentiable, and observations should come from whole episodes.
        progress: Whether to show a bar.

    Returns:
        The recording, for `solve` and `fit_teacache`.
    """
    if generations is not None and generations < 1:
        raise RecordingError(f"calibration needs at least one generation, got generations={generations}")
    if isinstance(observations, Mapping) or getattr(observations, "ndim", 4) < 4:
        raise ObservationError(
            "calibration needs a list of batches, each of one generation, and got a single one; observations in one array "
            "(N, n_obs_steps, obs_dim) are given as obs.split(1)"
        )
    port = port_of(policy)
    recorder = _Recorder(port)
    total = len(observations) if isinstance(observations, Sized) else generations
    total = total if generations is None or total is None else min(total, generations)
    started, count = time.perf_counter(), 0
    with attach(port, recorder.begin) as patches:
        if action_costs:
            recorder.costs = ActionCostCollector(port, patches, total or 1, progress)
        shown: dict[str, Any] = {"total": total, "unit": "generation", "disable": not progress, "delay": 1.0}
        for count, batch in enumerate(progress_bar(islice(observations, generations), "calibrating", **shown), start=1):
            recorder.generation(batch, seed=seed + count)
        if not count:
            raise RecordingError("calibration needs at least one observation, got none")
        costs = None if recorder.costs is None else recorder.costs.result()
    seconds = round(time.perf_counter() - started, 2)
    return recorder.result(count, {"seed": seed, "seconds": seconds}, costs)


class _Recorder:
    """Running sums over samples."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.part = 1  # samples run at once; known to fit only once a first sample has been seen
        n, k = len(port.adapter.blocks), len(port.timesteps)
        self.sums = {name: np.zeros((n, k, k)) for name in METRICS}
        self.scores = np.zeros(n)
        self.changes: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []  # input, output of each sample
        self.current: _RecordingGeneration | None = None
        self.thread = threading.get_ident()
        self.costs: ActionCostCollector | None = None

    def begin(self) -> _RecordingGeneration:
        run = _RecordingGeneration(self.port, keep_calls=self.costs is not None)
        if threading.get_ident() == self.thread:  # what other threads generate meanwhile is not recorded
            self.current = run
        return run

    def generation(self, batch: Any, seed: int) -> None:
        size, start = batch_size(batch), 0
        while start < size:
            stop = min(start + self.part, size)
            seeds = range(seed * 1_000_003 + start, seed * 1_000_003 + stop)
            returned = self._generate(rows(batch, start, stop), seeds)
            assert self.current is not None
            residuals = self._reduce(self.current, stop - start)
            if self.costs is not None:
                self.costs.add(self.current.calls, residuals, returned, seeds)
            self.part = max(1, FEATURE_BYTES * (stop - start) // self.current.feature_bytes)
            self.current = None
            start = stop

    @torch.no_grad()  # public policies leave this to their caller; a graph over all steps would take gigabytes
    def _generate(self, batch: Any, seeds: range) -> Any:
        """Where a policy takes noise, each sample has its own seed, so parts of any size give the same recording."""
        predict_action = getattr(self.port.policy, self.port.entry)
        if not self.port.takes_noise:
            return generate(predict_action, batch, seeds[0])
        noise = [self.port.draw_noise(1, torch.Generator().manual_seed(seed)) for seed in seeds]
        return predict_action(batch, noise=torch.cat(noise, dim=1))  # (1 + draws, B, T, D)

    def _reduce(self, run: _RecordingGeneration, samples: int) -> list[Tensor]:
        """Add a generation to the sums; its residuals by block, (K, B, F), if action costs need them."""
        kept = []
        for index, features in enumerate(run.features.values()):
            held = torch.stack(features)  # (K, B, F)
            features.clear()
            kept += [] if self.costs is None else [held]
            if not bool(torch.isfinite(held).all()):
                raise RecordingError(f"{list(run.features)[index]} gave NaN or infinity; check the policy's weights")
            for sample in range(samples):
                feature = held[:, sample].to(torch.float64).numpy()
                for name, metric in METRICS.items():
                    matrix = metric(feature)
                    self.sums[name][index] += matrix
                    if name == "l1":  # a mean over elements; the score sums them
                        self.scores[index] += matrix.mean() * feature.shape[1]
        inputs, outputs = _columns(run.input_change, samples), _columns(run.output_change, samples)
        self.changes += list(zip(inputs, outputs, strict=True))
        return kept

    def result(
        self, generations: int, origin: Mapping[str, Any], action_costs: NDArray[np.float64] | None
    ) -> Recording:
        samples = len(self.changes)
        inputs, outputs = (np.stack(changes) for changes in zip(*self.changes, strict=True))
        return Recording(
            blocks=self.port.adapter.blocks,
            matrices={name: total / samples for name, total in self.sums.items()},
            scores=self.scores / samples,
            input_change=inputs,
            output_change=outputs,
            generations=generations,
            fingerprint=self.port.fingerprint,
            origin={**origin, "samples": samples},
            action_costs=action_costs,
            every_step=self.port.adapter.every_step,
        )


class _RecordingGeneration(Generation):
    """One generation: computes everything, keeps every residual, and if told so every call of the denoiser."""

    def __init__(self, port: Port, keep_calls: bool = False) -> None:
        self.calls: list[DenoiserCall] = []
        self._keep_calls = keep_calls
        self.features: dict[str, list[Tensor]] = {block.name: [] for block in port.adapter.blocks}
        self.last = len(port.adapter.layers) - 1
        self.feature_bytes = 0
        self.input_change: list[Tensor] = []
        self.output_change: list[Tensor] = []
        self._before: dict[str, Tensor] = {}
        self._entered: Tensor

    def denoise(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._keep_calls:
            return forward(*args, **kwargs)
        out, call = DenoiserCall.watched(forward, args, kwargs)
        self.calls.append(call)
        return out

    def layer(self, call: LayerCall) -> Tensor:
        if call.index == 0:
            self._entered = call.stream
            self._note("input", call.layer.first_input(call.stream), self.input_change)
        out = call.routed(self._route)
        if call.index == self.last:
            self._note("output", out - self._entered, self.output_change)
        return out

    def _route(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        residual = compute()
        held = residual.detach().to("cpu", torch.float32).flatten(1)  # (B, T * d)
        self.features[name].append(held)
        self.feature_bytes += held.numel() * held.element_size()
        return residual

    def _note(self, what: str, value: Tensor, changes: list[Tensor]) -> None:
        value = value.detach().to("cpu", torch.float64).flatten(1)
        if what in self._before:
            changes.append(relative_change(value, self._before[what]))
        self._before[what] = value


def relative_change(value: Tensor, before: Tensor) -> Tensor:
    """mean|value - before| / mean|before| for each sample, (B, ...) -> (B,).

    Args:
        value: (B, ...) what there is now.
        before: (B, ...) what there was one step earlier.
    """
    difference = (value - before).abs().flatten(1).mean(dim=1)
    return difference / before.abs().flatten(1).mean(dim=1).clamp_min(torch.finfo(torch.float32).tiny)


def _columns(changes: list[Tensor], samples: int) -> NDArray[np.float64]:
    """(B,) for each step but the first -> (B, K - 1)."""
    return torch.stack(changes, dim=1).numpy() if changes else np.zeros((samples, 0))
