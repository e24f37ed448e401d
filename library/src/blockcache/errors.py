"""Everything that blockcache refuses, it refuses with one of these: the runtime's errors, and those of the library alone."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from blockcache_runtime.errors import BlockcacheError as BlockcacheError
from blockcache_runtime.errors import ContentError as ContentError
from blockcache_runtime.errors import EngineError as EngineError
from blockcache_runtime.errors import FileError as FileError
from blockcache_runtime.errors import NonFiniteError as NonFiniteError
from blockcache_runtime.errors import ObservationError as ObservationError
from blockcache_runtime.errors import in_one_line as in_one_line
from blockcache_runtime.errors import short as short
from blockcache_runtime.errors import shortened as shortened


class ScheduleError(BlockcacheError):
    """A schedule that is not well formed, or that does not fit the policy it is meant for."""


class RecordingError(BlockcacheError):
    """A calibration that cannot be used, such as one that holds NaN."""


class PolicyError(BlockcacheError):
    """A policy that cannot be accelerated as it is."""


class StepError(BlockcacheError):
    """The denoiser was called with another timestep than the sampler's table says."""


class StaleError(EngineError):
    """The policy changed after an engine was made of it."""


class StaleWeightsError(StaleError):
    """The policy's weights changed after an engine had copied them."""


class SamplerError(BlockcacheError):
    """A sampler setting that is unknown or not supported."""


class FitError(BlockcacheError):
    """A sampler that cannot be placed or fitted for a policy, or a fit that is no better than where it started."""


class TaskError(BlockcacheError):
    """A task that is unknown, that lacks its simulator, or that the policy or the data does not fit."""


def entry_failure(what: str, point: EntryPoint, error: Exception) -> str:
    """One sentence about something of another package that cannot be loaded.

    Args:
        what: What the package brings, such as "task".
        point: The entry point that names it.
        error: What loading it raised.
    """
    package = point.dist.name if point.dist is not None else point.module
    return f"the {what} {point.name!r} of {package} cannot be loaded: {in_one_line(error)}"
