"""Action costs: what reusing a block does to the executed action, to first order. The generation is walked backwards.

For a few random vectors v over the executed actions, d(v . action)/d residual(k) is found for every block and step k.
Reusing at step k what the block added at step s moves the action along v by its product with residual(s) - residual(k).
Inside a segment these movements add up, so they are summed before they are squared; the mean of the squares over v is the
squared error of the action. One part of the observations is held at a time. Knows nothing of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.attach.generation import Attached
from blockcache.attach.walk_back import DenoiserCall, Recorded, walk_back
from blockcache.errors import RecordingError
from blockcache.models.port import Port
from blockcache.progress import progress_bar

VECTORS = 4
"""Random vectors for each observation; over 16 observations that is 64 of them."""
PART_BYTES = 256 * 2**20
"""Residuals and products held at once; beyond that, observations are walked back in parts."""
COST_BYTES = 2**30
"""Costs of all observations, which are held until the end; more than that is refused."""
KEPT = 0.75
"""The share of the observations that a cost is the mean of. Some sit at a fork of the task and have linear costs far
beyond what ever happens to the action; they would decide everything."""


class ActionCostCollector:
    """Collects generations, walks them back in parts, and keeps every sample's costs.

    Args:
        port: The policy, attached.
        attached: Its patches.
        samples: How many there will be, as far as that is known.
        progress: Whether to show a bar.
    """

    def __init__(self, port: Port, attached: Attached, samples: int, progress: bool) -> None:
        if port.sampler is None:
            raise RecordingError(
                f"action costs need a sampler whose table is known, and {port.sampling.unknown} is none; "
                "calibrate without them"
            )
        self._port, self._attached, self._progress = port, attached, progress
        self._shape = len(port.adapter.blocks), len(port.timesteps), len(port.timesteps)
        self._waiting: list[Recorded] = []
        self._found: list[NDArray[np.float32]] = []  # by part, (samples, blocks, K, K)
        self._check_size(samples)

    def add(self, calls: Sequence[DenoiserCall], residuals: Sequence[Tensor], returned: Any, seeds: range) -> None:
        """One generation; `seeds` has a number for each sample, which its vectors depend on."""
        action = self._port.action_of(returned).detach()
        self._waiting.append(Recorded(calls, residuals, action, _vectors(action, seeds)))
        self._check_size(sum(map(len, self._found)) + sum(run.size for run in self._waiting))
        products = 2 * VECTORS * 4 * math.prod(self._shape)  # and their running sums
        one = 4 * sum(item[:, 0].numel() for item in residuals) + products
        if one * (1 + sum(run.size for run in self._waiting)) > PART_BYTES:  # the next one would be too much
            self._walk_back()

    def result(self) -> NDArray[np.float64]:
        """(blocks, K, K): the robust mean over all samples."""
        self._walk_back()
        return lower_mean(np.concatenate(self._found))

    @torch.inference_mode(False)  # a caller may be in it, and what is made there cannot be differentiated
    def _walk_back(self) -> None:
        runs = _joined(self._waiting)
        self._waiting = []
        for run in runs:
            steps = walk_back(self._port, self._attached, run)
            shown: dict[str, Any] = {
                "total": len(run.calls),
                "unit": "step",
                "disable": not self._progress,
                "delay": 1.0,
                "leave": False,
            }
            products = np.zeros((run.size, VECTORS, *self._shape), dtype=np.float32)
            for step, gradients in progress_bar(steps, "action costs", **shown):  # gradients: by block, (V, B, F)
                for index, (gradient, residual) in enumerate(zip(gradients, run.residuals, strict=True)):
                    differences = residual[:step] - residual[step]
                    found = torch.einsum("vbf,sbf->bvs", gradient, differences)
                    products[:, :, index, :step, step] = found.numpy()
            self._found.append(segment_costs(products))

    def _check_size(self, samples: int) -> None:
        needed = 4 * samples * math.prod(self._shape)
        if needed > COST_BYTES:
            blocks, steps, _ = self._shape
            raise RecordingError(
                f"action costs of {blocks} blocks, {steps} steps and {samples} observations would take "
                f"{needed / 2**30:.1f} GB, the limit is {COST_BYTES / 2**30:g}; give fewer observations or a sampler of "
                "fewer steps"
            )


def segment_costs(products: NDArray[np.float32]) -> NDArray[np.float32]:
    """(..., V, blocks, K, K) products [s, k] for V vectors, 0 unless k > s -> (..., blocks, K, K) costs [s, e]."""
    moved = np.cumsum(products, axis=-1)
    return np.square(moved, out=moved).mean(axis=-4)


def lower_mean(costs: NDArray[np.float32], kept: float = KEPT) -> NDArray[np.float64]:
    """(observations, ...) -> (...): for each entry the mean of the lowest `kept` of the observations."""
    count = math.ceil(kept * len(costs))
    lowest = costs if count == len(costs) else np.partition(costs, count - 1, axis=0)[:count]
    return lowest.mean(axis=0, dtype=np.float64)


def _vectors(action: Tensor, seeds: range) -> Tensor:
    """(V, B, n, A) of random signs; the mean of (v . error)^2 over v is the mean squared error of the executed actions."""
    shape = VECTORS, *action.shape[1:]
    others = [~seed & 0xFFFFFFFF for seed in seeds]  # the noise was drawn from the seeds themselves
    drawn = [torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) for seed in others]
    return (2.0 * torch.stack(drawn, dim=1) - 1) / math.sqrt(math.prod(action.shape[1:]))


class _ApartError(Exception):
    """Generations that cannot be walked back as one batch."""


def _joined(runs: Sequence[Recorded]) -> list[Recorded]:
    """Several generations as one batch, which takes hardly longer than one; as they are where that cannot be."""
    if len(runs) < 2:
        return list(runs)
    sizes = [run.size for run in runs]
    try:
        calls = [
            DenoiserCall(
                _together([call.args for call in calls], sizes),
                _together([call.kwargs for call in calls], sizes),
                torch.cat([call.out for call in calls]),
            )
            for calls in zip(*(run.calls for run in runs), strict=True)
        ]
    except _ApartError:
        return list(runs)
    residuals = [torch.cat(parts, dim=1) for parts in zip(*(run.residuals for run in runs), strict=True)]
    action, vectors = torch.cat([run.action for run in runs]), torch.cat([run.vectors for run in runs], dim=1)
    return [replace(runs[0], calls=calls, residuals=residuals, action=action, vectors=vectors)]


def _together(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Tensors with a value for each sample behind one another; whatever else there is must be the same in all."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _together([value[key] for value in values], sizes) for key in first}
    if isinstance(first, tuple):
        return tuple(_together(items, sizes) for items in zip(*values, strict=True))
    if isinstance(first, Tensor):
        if all(value.ndim and len(value) == size for value, size in zip(values, sizes, strict=True)):
            return torch.cat(list(values))
        same = all(torch.equal(first, value) for value in values)
    else:
        same = all(value is first or value == first for value in values)
    if not same:
        raise _ApartError
    return first
