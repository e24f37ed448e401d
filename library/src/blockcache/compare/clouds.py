"""Clouds of actions: many chunks for each observation, drawn by whatever makes actions of observations.

`measure.distance` compares them. Knows nothing of tasks, and of policies no more than that they act.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.measure.action_error import Act
from blockcache.observations import batch_size, parts
from blockcache.progress import progress_bar

BATCH = 32  # observations run at once


def draw_chunks(
    act: Act,
    observations: Any,
    samples: int,
    scale: NDArray[np.float64],
    seed: int,
    *,
    batch: int = BATCH,
    progress: str | None = None,
) -> NDArray[np.float64]:
    """Executed chunks in normalised units, (observations, samples, n_action, A).

    Each sample is a pass over all observations, so that the first few samples are those that a smaller number gives.
    Another seed gives independent noise; the same seed, observations and batch give two methods the same noise.

    act           such as `Running.act`: (a batch of observations, seed) -> executed actions in robot units
    observations  a batch
    samples       chunks for each observation
    scale         (A,) the port's `action_scale`
    progress      what a bar says, if there is to be one
    """
    batches = parts(observations, batch)
    bar = progress_bar(
        total=samples * batch_size(observations), desc=progress, unit="chunk", disable=progress is None, leave=False
    )
    drawn = []
    with bar:
        for sample in range(samples):
            chunks = []
            for place, part in enumerate(batches):
                # mixed, not added: seeds that are neighbours must not share a pass
                mixed = np.random.SeedSequence((seed, sample, place)).generate_state(1)
                chunks.append(act(part, int(mixed[0])) * scale)
                bar.update(len(chunks[-1]))
            drawn.append(np.concatenate(chunks))
    return np.stack(drawn, axis=1)


def flattened(chunks: NDArray[np.float64]) -> NDArray[np.float64]:
    """(observations, samples, features), as distances take them."""
    return chunks.reshape(*chunks.shape[:2], -1)
