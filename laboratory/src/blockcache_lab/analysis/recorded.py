"""What can be read off a recording alone: similarity matrices, and the action costs beside them.

Knows nothing of torch and of policies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockcache.results.analysis_section import AnalysisError
from blockcache.results.analysis_sections import LAGS, ActionCosts, Similarity
from blockcache.solvers.recording import Recording


def similarity(recording: Recording, lags: Sequence[int] = LAGS) -> Similarity:
    """The cosine matrices of a recording; of the lags those that it has steps for."""
    return Similarity(_within(lags, recording.steps), recording.matrices["cosine"])


def action_costs(recording: Recording, lags: Sequence[int] = LAGS) -> ActionCosts:
    """What the executed action feels if a block is reused for so many steps, and how alike its outputs are over them."""
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
