"""How alike episodes are: cosine between their features, block by block and step by step. And how few make a schedule.

Each sample has noise of its own, as episodes have. Features are held for some blocks at a time, so that memory is bounded.
Knows nothing of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.models.port import Port
from blockcache.observations import batch_size, parts, rows
from blockcache.progress import progress_bar
from blockcache.solvers.bac import adaptive
from blockcache.solvers.recording import cosine
from blockcache_lab.analysis.residuals import HELD_BYTES, every_step, residuals
from blockcache_lab.analysis.section import AnalysisError
from blockcache_lab.analysis.sections import Homogeneity, Stability

STEPS = 10
DRAWS = 8


def homogeneity(
    port: Port,
    observations: Sequence[Any],
    seed: int = 0,
    *,
    separate: bool = False,
    block: str | None = None,
    progress: str | None = None,
) -> Homogeneity:
    """Cosine between the features of all pairs of samples, at 10 evenly spaced steps, and its mean at every step; the latter
    once more with the same noise for all.

    Args:
        port: The policy.
        observations: Batches of samples, each of another episode.
        seed: Of the noise.
        separate: Whether the episodes are known to be different ones.
        block: Whose pairs and whose two similarity matrices are kept; the last unless named.
        progress: The words before a progress bar; None shows none.
    """
    names = [item.name for item in port.adapter.blocks]
    block, steps = block or names[-1], len(port.timesteps)
    if block not in names:
        raise AnalysisError(f"no block {block!r}, the policy's are {names[0]} to {names[-1]}")
    at = np.unique(np.linspace(0, steps - 1, min(STEPS, steps)).round().astype(int))
    episodes = sum(map(batch_size, observations))
    if episodes < 2:
        raise AnalysisError(f"homogeneity compares episodes, and there is {episodes}; give more observations")
    found, pair = _cosines(port, observations, seed, at, block, progress)
    pairs = np.triu_indices(episodes, 1)
    values = np.stack([[matrix[pairs] for matrix in found[name].between] for name in names])  # (blocks, at, pairs)
    low, high = np.percentile(values, (5, 95), axis=2)
    means, one_noise = (np.stack([getattr(found[name], kind) for name in names]) for kind in ("mean", "one_noise"))
    statistics = values.mean(axis=2), values.std(axis=2), low, high, means, one_noise
    return Homogeneity(separate, tuple(at.tolist()), *statistics, block, int(at[-1]), found[block].between[-1], pair)


def _mean_of_pairs(total: Tensor, count: int) -> NDArray[np.float64]:
    """(K,): the mean cosine over all pairs of `count` unit vectors whose sum is `total` (K, F).

    The square of the sum adds up all pairs, and each vector with itself.
    """
    whole = total.square().sum(dim=1)
    mean: NDArray[np.float64] = ((whole - count) / (count * (count - 1))).clamp(-1, 1).numpy()
    return mean


class _Block(NamedTuple):
    """Cosines between samples at some steps, (at, N, N), and means over pairs at all, (K,), with own noise and with one."""

    between: NDArray[np.float64]
    mean: NDArray[np.float64]
    one_noise: NDArray[np.float64]


def _cosines(
    port: Port, observations: Sequence[Any], seed: int, at: NDArray[np.intp], block: str, progress: str | None
) -> tuple[dict[str, _Block], NDArray[np.float64]]:
    """By block what there is between samples, and two samples' own similarity matrices of one block."""
    names, full = [item.name for item in port.adapter.blocks], every_step(port)
    one = residuals(port, full, rows(observations[0], 0, 1), seed, names[:1])[names[0]]
    samples = sum(map(batch_size, observations))
    held = one[0].numel() * (4 * len(at) * samples + 2 * 8 * full.steps)  # bytes for each block
    size = max(1, HELD_BYTES // held)
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    alone = [item for batch in observations for item in parts(batch, 1)]
    again = observations if port.takes_noise else alone
    count = len(groups) * (len(observations) + len(again))
    found, pair = {}, list[NDArray[np.float64]]()
    bar = progress_bar(desc=progress, total=count, unit="batch", disable=progress is None, delay=1.0, leave=False)
    with bar:
        for group in groups:
            features = {name: list[Tensor]() for name in group}
            own, shared = (dict.fromkeys(group, torch.zeros(())) for _ in range(2))  # sums over samples
            for index, batch in enumerate(observations):
                for name, added in residuals(port, full, batch, seed + index, group).items():
                    unit = _unit(added)
                    own[name] = own[name] + unit.sum(dim=1)
                    features[name].append(unit[at].float())
                    if name == block and len(pair) < 2:
                        pair += [cosine(item.numpy()) for item in unit.unbind(dim=1)[: 2 - len(pair)]]
                bar.update()
            for batch in again:
                for name, added in residuals(port, full, batch, seed, group, one_noise=True).items():
                    shared[name] = shared[name] + _unit(added).sum(dim=1)
                bar.update()
            for name in group:
                vectors = torch.cat(features.pop(name), dim=1).double()  # (at, N, F)
                between = torch.bmm(vectors, vectors.transpose(1, 2)).clamp(-1, 1).numpy()
                means = (_mean_of_pairs(total[name], samples) for total in (own, shared))
                found[name] = _Block(between, *means)
    return found, np.stack(pair)


def _unit(added: Tensor) -> Tensor:
    """(K, B, T, d) -> (K, B, F), each of length 1."""
    return torch.nn.functional.normalize(added.flatten(2).cpu().double(), dim=2)


def sample_matrices(
    port: Port, observations: Sequence[Any], seed: int = 0, progress: str | None = None
) -> NDArray[np.float32]:
    """(samples, blocks, K, K): the cosine matrices of each sample by itself.

    Args:
        port: The policy.
        observations: Batches as the policy takes them.
        seed: The noise depends on it and the batch's place alone.
        progress: The words before a progress bar; None shows none.
    """
    found = []
    batches = progress_bar(observations, progress, unit="batch", disable=progress is None, delay=1.0, leave=False)
    for index, batch in enumerate(batches):
        by_block = residuals(port, every_step(port), batch, seed + index)
        features = [item.flatten(2).cpu().double().numpy() for item in by_block.values()]  # (K, B, F)
        for sample in range(features[0].shape[1]):
            found.append(np.stack([cosine(item[:, sample]) for item in features]).astype(np.float32))
    if not found:
        raise AnalysisError("similarity matrices need at least one observation, got none")
    return np.stack(found)


def schedule_stability(matrices: NDArray[np.float32], updates: int, seed: int = 0, draws: int = DRAWS) -> Stability:
    """Schedules of 1, 2, 4 ... samples, drawn at random, beside that of all.

    Args:
        matrices: (samples, blocks, K, K), as `sample_matrices` gives them.
        updates: Update steps of each block, S.
        seed: Of the draws.
        draws: How many for each number of samples.
    """
    total, rng = len(matrices), np.random.default_rng(seed)
    if total < 2:
        raise AnalysisError(
            f"stability compares few generations with many, and there is {total}; give more observations"
        )
    mean = matrices.mean(axis=0, dtype=np.float64)
    best = [adaptive(matrix, updates) for matrix in mean]
    least = _dissimilarity(mean, best)
    counts = [2**power for power in range(total.bit_length()) if 2**power < total]
    shared, excess = np.zeros((len(counts), draws)), np.zeros((len(counts), draws))
    for row, count in enumerate(counts):
        for draw in range(draws):
            some = matrices[rng.choice(total, count, replace=False)].mean(axis=0, dtype=np.float64)
            steps = [adaptive(matrix, updates) for matrix in some]
            shared[row, draw] = _shared(steps, best)
            excess[row, draw] = _dissimilarity(mean, steps) / max(least, 1e-12) - 1
    return Stability(total, updates, tuple(counts), shared, excess)


def _dissimilarity(matrices: NDArray[np.float64], steps: Sequence[Sequence[int]]) -> float:
    """Of what is reused to what would be computed, over all blocks and steps."""
    total = 0.0
    for matrix, own in zip(matrices, steps, strict=True):
        anchors = np.array(own)[np.searchsorted(own, np.arange(len(matrix)), side="right") - 1]
        total += float((1 - matrix[anchors, np.arange(len(matrix))]).sum())
    return total


def _shared(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Updates that both have, of those that either has; step 0, which all have, left out."""
    cells = [{(block, step) for block, own in enumerate(steps) for step in own if step} for steps in (one, other)]
    either = cells[0] | cells[1]
    return len(cells[0] & cells[1]) / len(either) if either else 1.0
