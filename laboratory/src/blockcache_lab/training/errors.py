"""What a training run that cannot be started, or gone on with, raises."""

from __future__ import annotations

from blockcache.errors import BlockcacheError


class TrainingError(BlockcacheError):
    """A training run that cannot be started, or gone on with, as asked."""
