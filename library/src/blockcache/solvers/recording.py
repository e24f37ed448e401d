"""The Recording: what calibration saw. How alike each block's outputs are between steps, and how much they change.

A frozen value with a safetensors file format (docs/file-formats.md). Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from blockcache.block import Block
from blockcache.errors import RecordingError, short, shortened
from blockcache.files import Count, Format, PathLike, expect_keys
from blockcache.fingerprint import Fingerprint
from blockcache.schedule.schedule import MOST_STEPS, checked_origin

FORMAT = Format(
    "blockcache.recording",
    "recording",
    {"blocks": list[Block], "generations": Any, "fingerprint": Fingerprint, "origin": dict, "every_step": Count},
    optional=("every_step",),
    again="calibrate again",
)
Array = NDArray[np.float64]
# names of tensors in the file
_MATRICES, _ARRAYS, _COSTS = "matrices.", ("scores", "input_change", "output_change"), "action_costs"


@dataclass(frozen=True, eq=False)
class Recording:
    """Averages over all samples of a calibration.

    Args:
        blocks: The policy's, in execution order.
        matrices: Metric -> (blocks, K, K); a recording of older or newer code may have other metrics than METRICS.
        scores: (blocks,) mean over all pairs of steps of the L1 norm of the difference; picks the union's blocks.
        input_change: (samples, K - 1) relative change from one step to the next of the first block's normalised input.
        output_change: The same of the whole stack's residual; TeaCache is fitted to both.
        generations: How many were recorded.
        fingerprint: The policy that was recorded.
        origin: How the recording came to be, in JSON types.
        action_costs: (blocks, K, K) or None: [s, e] is the mean squared error that the executed action suffers, to first
            order, if the block is computed at step s and reused up to step e.
        every_step: FLOPs of a step outside the blocks, where that was recorded.
    """

    blocks: tuple[Block, ...]
    matrices: Mapping[str, Array]
    scores: Array
    input_change: Array
    output_change: Array
    generations: int
    fingerprint: Fingerprint = Fingerprint()
    origin: Mapping[str, Any] = field(default_factory=dict)
    action_costs: Array | None = None
    every_step: int | None = None

    def __post_init__(self) -> None:
        if not self.matrices:
            raise RecordingError("a recording holds the matrices of one metric at least, got none; calibrate again")
        if not self.blocks or type(self.generations) is not int or self.generations < 1:
            raise RecordingError(
                f"a recording holds blocks and generations, got {len(self.blocks)} and {short(self.generations)}"
            )
        if self.every_step is not None and (type(self.every_step) is not int or self.every_step < 0):
            raise RecordingError(
                f"a step's FLOPs outside the blocks must be a whole number, got {short(self.every_step)}"
            )
        object.__setattr__(self, "origin", checked_origin(self.origin, RecordingError))
        n, k = len(self.blocks), self.steps
        if len({block.name for block in self.blocks}) < n or max(n, k) > MOST_STEPS:
            raise RecordingError(
                f"a recording holds blocks of different names, {MOST_STEPS:,} of them and of steps at most, got {n} and {k}"
            )
        shapes = {
            **{name: (matrix, (n, k, k)) for name, matrix in self.matrices.items()},
            "scores": (self.scores, (n,)),
            "input_change": (self.input_change, (self.samples, k - 1)),
            "output_change": (self.output_change, (self.samples, k - 1)),
            **({} if self.action_costs is None else {_COSTS: (self.action_costs, (n, k, k))}),
        }
        for name, (array, shape) in shapes.items():
            if array.shape != shape:
                raise RecordingError(f"the recording's {shortened(name, 60)} has shape {array.shape}, expected {shape}")
            if array.dtype.kind != "f":
                raise RecordingError(f"the recording's {shortened(name, 60)} holds {array.dtype}, expected floats")
            if not np.isfinite(array).all():
                raise RecordingError(
                    f"the recording's {shortened(name, 60)} holds NaN or infinity; calibrate again on sound observations"
                )

    @property
    def steps(self) -> int:
        trusted = next((name for name in METRICS if name in self.matrices), min(self.matrices))
        return int(self.matrices[trusted].shape[-1])

    @property
    def samples(self) -> int:
        return len(self.input_change)

    def matrix(self, metric: str, block: str) -> Array:
        """One block's (K, K) matrix.

        Args:
            metric: One of those in `matrices`.
            block: Its name.
        """
        if metric not in self.matrices:
            known = ", ".join(self.matrices)
            if metric not in METRICS:
                raise RecordingError(f"unknown metric {metric!r}, known are {known}")
            raise RecordingError(
                f"the recording lacks the metric {metric}, it has {known}; calibrate again with 'blockcache calibrate'"
            )
        names = [item.name for item in self.blocks]
        if block not in names:
            raise RecordingError(f"no block {block!r} in this recording, it has {names[0]} to {names[-1]}")
        return self.matrices[metric][names.index(block)]

    def save(self, path: PathLike) -> None:
        """Write the safetensors file, atomically.

        Args:
            path: The file.
        """
        content = {
            "blocks": [asdict(block) for block in self.blocks],
            "generations": self.generations,
            "fingerprint": self.fingerprint.to_dict(),
            "origin": dict(self.origin),
            **({} if self.every_step is None else {"every_step": self.every_step}),
        }
        tensors = {_MATRICES + name: matrix for name, matrix in self.matrices.items()}
        tensors |= {name: getattr(self, name) for name in _ARRAYS}
        tensors |= {} if self.action_costs is None else {_COSTS: self.action_costs}
        arrays = {name: np.ascontiguousarray(array, dtype=np.float64) for name, array in tensors.items()}
        FORMAT.save_tensors(path, content, arrays, safetensors.numpy.save)

    @classmethod
    def load(cls, path: PathLike) -> Recording:
        """Read a file that `save` wrote; other metrics are let pass, anything else is refused.

        Args:
            path: The file.
        """
        content, tensors = FORMAT.load_tensors(path, safetensors.numpy.load)
        matrices = {
            name.removeprefix(_MATRICES): array for name, array in tensors.items() if name.startswith(_MATRICES)
        }
        with FORMAT.reading(path):
            expect_keys({name for name in tensors if not name.startswith(_MATRICES)}, _ARRAYS, (_COSTS,))
            return cls(
                **{**content, "blocks": tuple(content["blocks"]), **{name: tensors[name] for name in _ARRAYS}},
                matrices=matrices,
                action_costs=tensors.get(_COSTS),
            )


# -- how alike a block's outputs are at different steps: (K, F) features -> (K, K), symmetric


def cosine(features: Array) -> Array:
    """Cosine similarity. Two zero vectors are equal (1); a zero vector resembles nothing else (0).

    Args:
        features: (K, F), a row for each step.
    """
    norms = np.linalg.norm(features, axis=1)
    unit = features / np.where(norms > 0, norms, 1.0)[:, None]
    # |a - b|^2 = 2 - 2 cos for unit vectors; a matrix product would wait for BLAS threads, 60 times longer on a busy CPU
    similarity: Array = np.clip(1.0 - _pairs(unit, "sqeuclidean") / 2, -1.0, 1.0)
    zero = norms == 0
    similarity[zero] = similarity[:, zero] = 0.0
    similarity[np.ix_(zero, zero)] = 1.0
    np.fill_diagonal(similarity, 1.0)
    return similarity


def mse(features: Array) -> Array:
    """Mean squared difference."""
    return _distances(features, "sqeuclidean")


def l1(features: Array) -> Array:
    """Mean absolute difference."""
    return _distances(features, "cityblock")


def wasserstein(features: Array) -> Array:
    """Wasserstein-1 distance between the values of two features: mean absolute difference once both are sorted."""
    return _distances(np.sort(features, axis=1), "cityblock")


METRICS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {"cosine": cosine, "mse": mse, "l1": l1, "wasserstein": wasserstein}
)
SIMILARITIES = frozenset({"cosine"})
"""Metrics that are maximised; the others are distances."""


def _distances(features: Array, kind: str) -> Array:
    return _pairs(features, kind) / features.shape[1]


def _pairs(features: Array, kind: str) -> Array:
    from scipy.spatial.distance import pdist, squareform  # here: the names of metrics need not wait for it

    return squareform(pdist(features, kind))
