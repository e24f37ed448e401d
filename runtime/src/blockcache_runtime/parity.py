"""Whether an export answers here as the policy that it was made of: its actions beside recorded ones, with the same noise.

A reference is an .npz file of a few observations, noise and the policy's own answers under the file's schedule, bound to one
export by that file's hash. `blockcache export --with-reference N` writes it; to compare, numpy and onnxruntime are enough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np

from blockcache_runtime.arrays import parse_arrays, write_arrays
from blockcache_runtime.atomic import PathLike, write_bytes
from blockcache_runtime.checks import Array, read_array
from blockcache_runtime.errors import FileError, ObservationError
from blockcache_runtime.export import ExportedPolicy
from blockcache_runtime.fields import Count, Limit
from blockcache_runtime.files import JSON_BYTES, Format, parse_json, read_bytes

TOLERANCE = 1e-3
"""Of the range that actions have in training; engines of blockcache differ by 1e-5 and less, half precision by more."""
FORMAT = Format(
    "blockcache.reference",
    "reference",
    {"export": Annotated[str, Limit(64, 64)]},
    again="export again with --with-reference",
)
RESULT = Format(
    "blockcache.parity",
    "comparison",
    {
        "agrees": bool,
        "count": Count,
        **dict.fromkeys(("largest", "typical", "tolerance", "p50_ms", "p95_ms"), float),
        "same_export": bool,
    },
    again="compare again",
)
_HEADER, _INPUT = "header", "input."


@dataclass(frozen=True, eq=False)
class Reference:
    """What a policy answered.

    export: the hash of the file that it is the reference of.
    inputs: observations as that file takes them, (N, ...) by name.
    noise: (1 + draws, N, horizon, D).
    action: the executed actions, (N, n_action_steps, A), in robot units.
    scale: (A,) what turns robot units into the range that actions have in training, -1 to 1.
    """

    export: str
    inputs: Mapping[str, Array]
    noise: Array
    action: Array
    scale: Array

    def save(self, path: PathLike) -> None:
        text = FORMAT.text({"export": self.export}, path).encode()
        arrays = {f"{_INPUT}{name}": value for name, value in self.inputs.items()}
        own = {"noise": self.noise, "action": self.action, "scale": self.scale}
        write_arrays(path, **{_HEADER: np.frombuffer(text, np.uint8)}, **own, **arrays)

    @classmethod
    def load(cls, path: PathLike) -> Reference:
        """Read a file; one that is cut, or none of these, is refused."""
        arrays = parse_arrays(read_bytes(path, FORMAT.what), FORMAT.what, path)
        header = arrays.pop(_HEADER, np.zeros(0, np.uint8))
        content = FORMAT.parse(header.astype(np.uint8).tobytes().decode(errors="replace"), path)
        if missing := {"noise", "action", "scale"} - set(arrays):
            raise FileError(f"the {FORMAT.what} {path} lacks {', '.join(sorted(missing))}; {FORMAT.again}")
        own = {name: read_array(arrays.pop(name), f"{name} in {path}") for name in ("noise", "action", "scale")}
        inputs = {name.removeprefix(_INPUT): value for name, value in arrays.items() if name.startswith(_INPUT)}
        shapes = own["action"].ndim == 3 and own["noise"].ndim == 4 and own["scale"].shape == own["action"].shape[2:]
        counts = {len(value) for value in inputs.values() if value.ndim} | {len(own["action"]), own["noise"].shape[1]}
        if not shapes or not inputs or counts != {len(own["action"])} or not len(own["action"]):
            raise FileError(f"the {FORMAT.what} {path} has arrays that do not belong together; {FORMAT.again}")
        return cls(content["export"], inputs, **own)


@dataclass(frozen=True)
class Parity:
    """How an export's actions differ from a reference, in the range that actions have in training, and how long they took.

    count: observations.
    largest, typical: the largest difference of a number, and the root of the mean square.
    p50_ms, p95_ms: of one generation, on this machine.
    same_export: whether the reference was made for this very file.
    """

    count: int
    largest: float
    typical: float
    tolerance: float
    p50_ms: float
    p95_ms: float
    same_export: bool

    @property
    def agrees(self) -> bool:
        return self.same_export and self.largest <= self.tolerance  # NaN does not

    def save(self, path: PathLike) -> None:
        """As one JSON object, for a pipeline."""
        write_bytes(path, RESULT.text({"agrees": self.agrees, **asdict(self)}, path).encode())

    @classmethod
    def load(cls, path: PathLike) -> Parity:
        """Read what `save` wrote."""
        content = RESULT.content(parse_json(read_bytes(path, RESULT.what, JSON_BYTES), RESULT.what, path), path)
        del content["agrees"]
        return cls(**content)

    def __str__(self) -> str:
        verdict = "agrees with its policy" if self.agrees else "does NOT agree with the reference"
        other = "" if self.same_export else "; the reference was made for another export"
        return (
            f"{verdict}: {self.count} observations, actions differ by {self.largest:.1e} at most and {self.typical:.1e} "
            f"typically (tolerance {self.tolerance:g}; 1 is half of the range of actions){other}; one generation takes "
            f"{self.p50_ms:.1f} ms (p95 {self.p95_ms:.1f})"
        )


def export_hash(path: PathLike) -> str:
    """The hash that an export ends with: it tells files apart."""
    with open(path, "rb") as file:
        file.seek(-64, os.SEEK_END)
        return file.read().decode(errors="replace")


def compare(policy: ExportedPolicy, reference: Reference, tolerance: float = TOLERANCE) -> Parity:
    """Run every observation of a reference, one by one.

    Args:
        policy: The opened export.
        reference: What the policy that it was made of answered.
        tolerance: The largest difference that is accepted.
    """
    count, gaps, seconds = len(reference.action), [], []
    for place in [0, *range(count)]:  # the first twice: only the second call is warm
        obs = {name: value[place : place + 1] for name, value in reference.inputs.items()}
        started = time.perf_counter()
        found = policy.predict_action(obs, noise=reference.noise[:, place : place + 1])["action"]
        seconds.append(time.perf_counter() - started)
        if found.shape[1:] != reference.action.shape[1:]:
            raise ObservationError(
                f"the reference has actions of shape {reference.action.shape[1:]}, the export gives {found.shape[1:]}: it "
                "is that of another policy"
            )
        gaps.append((found[0] - reference.action[place]).astype(np.float64) * reference.scale)
    gap, warm = np.abs(gaps[1:]), 1000 * np.asarray(seconds[1:])
    p50, p95 = (float(np.percentile(warm, share)) for share in (50, 95))
    return Parity(
        count=count,
        largest=float(gap.max()),
        typical=float(np.sqrt(np.mean(gap**2))),
        tolerance=tolerance,
        p50_ms=p50,
        p95_ms=p95,
        same_export=reference.export == export_hash(policy.path),
    )
