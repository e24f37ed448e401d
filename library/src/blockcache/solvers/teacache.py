"""TeaCache, adapted to policies: recompute the whole stack when its input has drifted far enough. Pure numpy.

Not a schedule: the decision is taken while the policy runs, for each sample by itself, so only the patched engine can
follow it. Knows nothing of how a stack is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from blockcache.block import Block
from blockcache.errors import RecordingError
from blockcache.fingerprint import Fingerprint
from blockcache.solvers.recording import Recording

DEGREE = 4


@dataclass(frozen=True)
class TeaCacheRule:
    """Recompute once the estimated output change since the last computation reaches a threshold.

    The first and the last step are always computed.

    Args:
        coefficients: Highest power first; they estimate the relative change of the stack's residual over one step from that
            of the first block's normalised input.
        threshold: Of the estimated change, 0 or more.
        steps: Denoising steps of one generation.
        fingerprint: What the rule fits.
    """

    static: ClassVar[bool] = False

    coefficients: tuple[float, ...]
    threshold: float
    steps: int
    fingerprint: Fingerprint = Fingerprint()

    def __post_init__(self) -> None:
        if not (np.isfinite(self.threshold) and self.threshold >= 0):
            raise RecordingError(f"the threshold must be a finite number of at least 0, got {self.threshold!r}")
        if not self.coefficients or not np.isfinite(self.coefficients).all():
            raise RecordingError(f"the coefficients must be finite numbers, got {self.coefficients!r}")
        if self.fingerprint.steps not in (None, self.steps):
            raise RecordingError(
                f"the rule's {self.steps} steps differ from its fingerprint's {self.fingerprint.steps}"
            )
        object.__setattr__(self, "fingerprint", replace(self.fingerprint, steps=self.steps))

    def describe(self) -> dict[str, Any]:
        """All that decides the actions, in JSON types."""
        return {"coefficients": list(self.coefficients), "threshold": self.threshold}

    def flops(self, blocks: Sequence[Block], reused: float) -> int:
        """FLOPs of the blocks computed in one generation, of which the share `reused` was saved.

        Args:
            blocks: All blocks of the policy.
            reused: The share of block evaluations that was saved, 0 to 1.
        """
        return round(self.steps * (1 - reused) * sum(block.cost for block in blocks))


def fit_teacache(recording: Recording, threshold: float) -> TeaCacheRule:
    """TeaCache's rule for a policy.

    Args:
        recording: A calibration; the polynomial is fitted to its changes.
        threshold: The estimated change of the output at which the stack is computed anew: 0 computes every step.

    Raises:
        RecordingError: The recording has too few different changes to fit a polynomial to.
    """
    distinct = np.unique(recording.input_change).size
    if distinct <= DEGREE:
        raise RecordingError(f"TeaCache needs more than {DEGREE} different recorded changes, got {distinct}")
    fit = np.polynomial.Polynomial.fit(recording.input_change.ravel(), recording.output_change.ravel(), DEGREE)
    rising_powers = fit.convert().coef
    coefficients = np.zeros(DEGREE + 1)
    coefficients[: len(rising_powers)] = rising_powers
    return TeaCacheRule(
        tuple(float(c) for c in coefficients[::-1]), float(threshold), recording.steps, recording.fingerprint
    )
