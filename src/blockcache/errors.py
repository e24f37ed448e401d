"""Everything that blockcache refuses, it refuses with one of these.

A message says what is wrong, what was expected, what was found and what to do next, in one sentence or two.
"""


class BlockcacheError(Exception):
    """Base of every error that this package raises on purpose."""


def in_one_line(error: BaseException) -> str:
    """What foreign code raised, for a sentence of ours: its kind and the first line of what it says."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class ScheduleError(BlockcacheError):
    """A schedule that is not well formed, or that does not fit the policy it is meant for."""


class FileError(BlockcacheError):
    """A file that cannot be read, written or understood. A failed write leaves the old file whole."""


class ContentError(BlockcacheError):
    """A value that is not what it should be; the reader of a file turns it into a FileError that names the file."""


class RecordingError(BlockcacheError):
    """A calibration that cannot be used, such as one that holds NaN."""


class PolicyError(BlockcacheError):
    """A policy that cannot be accelerated as it is."""


class ObservationError(BlockcacheError):
    """An observation that the policy cannot answer: wrong shape, wrong type or not finite."""


class NonFiniteError(BlockcacheError):
    """A generation that went through NaN, infinity or numbers too large to compute with; no action is handed out."""


class StepError(BlockcacheError):
    """The denoiser was called with another timestep than the sampler's table says."""


class EngineError(BlockcacheError):
    """An engine that is missing, or that does not support what was asked of it."""


class StaleWeightsError(EngineError):
    """The policy's weights changed after an engine had copied them."""


class SamplerError(BlockcacheError):
    """A sampler setting that is unknown or not supported."""


class TaskError(BlockcacheError):
    """A task that is unknown, that lacks its simulator, or that the policy or the data does not fit."""
