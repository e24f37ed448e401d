"""The Recording: what calibration saw. How alike each block's outputs are between steps, and how much they change.

A frozen value with a safetensors file format (docs/recording-format.md). Knows nothing of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from blockcache._version import __version__
from blockcache.errors import FileError, RecordingError
from blockcache.files import PathLike, expect_format, parse_json, read_bytes, write_bytes
from blockcache.fingerprint import Fingerprint
from blockcache.schedule.block import Block
from blockcache.solvers.metrics import METRICS

FORMAT, VERSION = "blockcache.recording", 1
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Recording:
    """Averages over all samples of a calibration.

    matrices     metric -> (blocks, K, K)
    scores       (blocks,) mean over all pairs of steps of the L1 norm of the difference; picks the union's blocks
    input_change, output_change  (samples, K - 1) relative change, from one step to the next, of the first block's
                 normalised input and of the whole stack's residual; what TeaCache is fitted to
    """

    blocks: tuple[Block, ...]
    matrices: Mapping[str, Array]
    scores: Array
    input_change: Array
    output_change: Array
    generations: int
    fingerprint: Fingerprint = Fingerprint()
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.matrices) != set(METRICS):
            raise RecordingError(f"a recording holds {', '.join(METRICS)}, got {', '.join(self.matrices) or 'none'}")
        if not self.blocks or not isinstance(self.generations, int) or self.generations < 1:
            raise RecordingError(
                f"a recording holds blocks and generations, got {len(self.blocks)} and {self.generations!r}"
            )
        n, k = len(self.blocks), self.steps
        shapes = {
            **{name: (matrix, (n, k, k)) for name, matrix in self.matrices.items()},
            "scores": (self.scores, (n,)),
            "input_change": (self.input_change, (self.samples, k - 1)),
            "output_change": (self.output_change, (self.samples, k - 1)),
        }
        for name, (array, shape) in shapes.items():
            if array.shape != shape:
                raise RecordingError(f"the recording's {name} has shape {array.shape}, expected {shape}")
            if not np.isfinite(array).all():
                raise RecordingError(
                    f"the recording's {name} holds NaN or infinity; calibrate again on sound observations"
                )

    @property
    def steps(self) -> int:
        return int(self.matrices["cosine"].shape[-1])

    @property
    def samples(self) -> int:
        return len(self.input_change)

    def matrix(self, metric: str, block: str) -> Array:
        """One block's (K, K) matrix."""
        if metric not in self.matrices:
            raise RecordingError(f"unknown metric {metric!r}, known are {', '.join(self.matrices)}")
        names = [item.name for item in self.blocks]
        if block not in names:
            raise RecordingError(f"no block {block!r} in this recording, it has {names[0]} to {names[-1]}")
        matrix: Array = self.matrices[metric][names.index(block)]
        return matrix

    def save(self, path: PathLike) -> None:
        """Write the safetensors file, atomically."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "made_by": f"blockcache {__version__}",
            "blocks": [asdict(block) for block in self.blocks],
            "generations": self.generations,
            "fingerprint": self.fingerprint.to_dict(),
            "origin": dict(self.origin),
        }
        tensors = {f"matrices.{name}": matrix for name, matrix in self.matrices.items()}
        tensors |= {name: getattr(self, name) for name in ("scores", "input_change", "output_change")}
        arrays = {name: np.ascontiguousarray(array, dtype=np.float64) for name, array in tensors.items()}
        write_bytes(path, safetensors.numpy.save(arrays, metadata={"blockcache": json.dumps(header)}))

    @classmethod
    def load(cls, path: PathLike) -> Recording:
        """Read a file that `save` wrote; anything else is refused."""
        data = read_bytes(path, "recording")
        try:
            tensors = safetensors.numpy.load(data)
            text = _metadata(data).get("blockcache", "")
        except (SafetensorError, ValueError, KeyError) as error:
            raise FileError(f"the recording {path} cannot be read ({error}); it may be cut short") from error
        header = parse_json(text.encode() or b"{}", "recording's header", path)
        expect_format(header, FORMAT, VERSION, "recording", path)
        expected = {"format", "version", "made_by", "blocks", "generations", "fingerprint", "origin"}
        arrays = {*(f"matrices.{name}" for name in METRICS), "scores", "input_change", "output_change"}
        if set(header) != expected or set(tensors) != arrays:
            odd = ", ".join(sorted((set(header) ^ expected) | (set(tensors) ^ arrays)))
            raise FileError(f"the recording {path} has missing or unknown keys: {odd}; calibrate again")
        try:
            return cls(
                blocks=tuple(Block(**item) for item in header["blocks"]),
                matrices={name: tensors[f"matrices.{name}"] for name in METRICS},
                scores=tensors["scores"],
                input_change=tensors["input_change"],
                output_change=tensors["output_change"],
                generations=header["generations"],
                fingerprint=Fingerprint.from_dict(header["fingerprint"]),
                origin=header["origin"],
            )
        except (IndexError, TypeError) as error:
            raise FileError(f"the recording {path} is garbled ({error}); calibrate again") from error


def _metadata(data: bytes) -> dict[str, str]:
    """The header of a safetensors file held in memory: a length of 8 bytes, then JSON."""
    length = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return metadata
