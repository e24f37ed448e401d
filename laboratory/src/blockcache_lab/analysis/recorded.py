"""What can be read off a recording or a section alone: similarity, action costs, and surges of errors at updates.

An error surges where an FFN's caching error rises at the very step at which it is computed anew. Knows nothing of torch and
of policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blockcache.block import FEED_FORWARD, Block
from blockcache.solvers.recording import Recording
from blockcache_lab.analysis.section import AnalysisError, Array, Counts, Marks, one_of
from blockcache_lab.analysis.sections import LAGS, ActionCosts, Caching, Similarity


def similarity(recording: Recording, lags: Sequence[int] = LAGS) -> Similarity:
    """The cosine matrices of a recording; of the lags those that it has steps for.

    Args:
        recording: What `calibrate` gave.
        lags: Distances in steps.
    """
    return Similarity(_within(lags, recording.steps), recording.matrices["cosine"])


def action_costs(recording: Recording, lags: Sequence[int] = LAGS) -> ActionCosts:
    """What the executed action feels if a block is reused for so many steps, and how alike its outputs are over them.

    Args:
        recording: What `calibrate` gave; refused without action costs.
        lags: For how many steps a block is reused; those that there are no steps for are left out.
    """
    if recording.action_costs is None:
        raise AnalysisError(
            "The recording has no action costs; 'blockcache calibrate POLICY --action-costs' makes one, for policies "
            "whose denoiser can be differentiated and whose sampler is known."
        )
    kept, starts = _within(lags, recording.steps), np.arange(recording.steps)
    ends = [np.minimum(starts + lag, recording.steps - 1) for lag in kept]
    cosine = recording.matrices["cosine"]
    return ActionCosts(
        kept,
        np.stack([np.sqrt(recording.action_costs[:, starts, end].clip(min=0.0)) for end in ends]),
        np.stack([cosine[:, starts, end] for end in ends]),
    )


def _within(lags: Sequence[int], steps: int) -> tuple[int, ...]:
    kept = tuple(lag for lag in lags if lag < steps)
    if not kept:
        raise AnalysisError(f"The policy has {steps} step, so that nothing is ever reused.")
    return kept


@dataclass(frozen=True, eq=False)
class ErrorSurge:
    """`schedules` and `ffns` name the axes of all arrays.

    Args:
        errors: (schedules, ffns, K).
        updates: (schedules, ffns, K) marks.
        jumps: (schedules, ffns) the largest rise of the error from one step to an update step, 0 if it always falls.
        surges: (schedules, ffns) at how many update steps, the first left out, the error rose.
        at_updates: (schedules, ffns) the mean error at the update steps, the first left out; 0 if there are no others.
    """

    schedules: tuple[str, ...]
    ffns: tuple[str, ...]
    errors: Array
    updates: Marks
    jumps: Array
    surges: Counts
    at_updates: Array

    def of(self, schedule: str) -> tuple[Array, Counts]:
        """Jumps and surges of each FFN under one schedule."""
        place = one_of("schedule", schedule, self.schedules)
        return self.jumps[place], self.surges[place]

    def updated(self, schedule: str) -> Array:
        """The mean error of each FFN at its updates under one schedule."""
        errors: Array = self.at_updates[one_of("schedule", schedule, self.schedules)]
        return errors


def error_surge(caching: Caching, blocks: Sequence[Block]) -> ErrorSurge:
    """How each FFN's error behaves at its updates, under every schedule that there are errors of.

    Args:
        caching: Errors by schedule, block and step.
        blocks: The policy's, in execution order.
    """
    rows = [place for place, block in enumerate(blocks) if block.kind == FEED_FORWARD]
    if not rows:
        raise AnalysisError("error surges are those of FFNs, and this policy has no block of kind FFN")
    errors, updates = caching.errors[:, rows], caching.updates[:, rows]
    later = updates[:, :, 1:]  # the first step has no error
    rises = np.where(later, np.diff(errors, axis=2), 0.0).clip(min=0.0)
    return ErrorSurge(
        caching.schedules,
        tuple(blocks[place].name for place in rows),
        errors,
        updates,
        rises.max(axis=2, initial=0.0).astype(np.float32),
        (rises > 0).sum(axis=2),
        np.where(later, errors[:, :, 1:], 0.0).sum(axis=2) / np.maximum(later.sum(axis=2), 1),
    )
