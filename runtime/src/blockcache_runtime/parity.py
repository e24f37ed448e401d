"""Whether an export answers here as the policy that it was made of: its actions beside recorded ones, with the same noise.

A reference is an .npz file of a few observations, noise and the policy's own answers under the file's schedule, bound to one
export by that file's hash. `blockcache export --with-reference N` writes it; to compare, numpy and onnxruntime are enough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np

from blockcache_runtime.arrays import parse_arrays, write_arrays
from blockcache_runtime.atomic import PathLike, write_bytes
from blockcache_runtime.checks import Array, read_array
from blockcache_runtime.errors import EngineError, FileError, ObservationError
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
        "nodes": dict[str, Count],
        "beside": str,
    },
    optional=("nodes", "beside"),
    again="compare again",
)
AT_START = 4
"""Observations that are compared when an export is opened with providers."""
_HEADER, _INPUT = "header", "input."


class OtherPolicyError(ObservationError):
    """A reference whose observations, noise or answers have other shapes than an export's: it is another policy's."""


class Export(Protocol):
    """What is compared: an opened export."""

    path: Path
    cameras: tuple[str, ...]

    @property
    def nodes(self) -> Mapping[str, int]:
        """How many nodes each provider of ONNX Runtime runs, where providers were asked for."""

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """What it observes: shapes by name, without the batch."""

    @property
    def falls_back(self) -> bool:
        """Whether it can answer in full precision as well."""

    def draw_noise(self, batch: int, generator: np.random.Generator | None = None, full: bool = False) -> Array:
        """The noise of one generation, (1 + draws, B, horizon, D)."""

    def check_observation(self, obs: Any) -> dict[str, Array]:
        """The observation as `run` takes it."""

    def run(
        self, observed: Mapping[str, Array], noise: Any, previous: Any = None, full: bool = False
    ) -> dict[str, Array]:
        """One generation, which no guard judges."""


@dataclass(frozen=True, eq=False)
class Reference:
    """What a policy answered.

    Args:
        export: The hash of the export that the answers belong to.
        inputs: Observations as that file takes them, (N, ...) by name.
        noise: The noise of each generation, (1 + draws, N, horizon, D).
        action: The executed actions, (N, n_action_steps, A), in robot units.
        scale: (A,) what turns robot units into the range that actions have in training, -1 to 1.
    """

    export: str
    inputs: Mapping[str, Array]
    noise: Array
    action: Array
    scale: Array

    def first(self, count: int) -> Reference:
        """The first observations and answers alone."""
        inputs = {name: value[:count] for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, noise=self.noise[:, :count], action=self.action[:count])

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
        count = own["action"].shape[:1]
        counts = {value.shape[:1] for value in inputs.values()} | {own["noise"].shape[1:2]}
        if not shapes or not inputs or counts != {count} or not all(count):
            raise FileError(f"the {FORMAT.what} {path} has arrays that do not belong together; {FORMAT.again}")
        return cls(content["export"], inputs, **own)


@dataclass(frozen=True)
class Parity:
    """How an export's actions differ from a reference, in the range that actions have in training, and how long they took.

    Args:
        count: How many observations were compared.
        largest: The largest difference of a number.
        typical: The root of the mean square of all differences.
        tolerance: The largest difference that is accepted.
        p50_ms: The median time of one generation, on this machine.
        p95_ms: The time that one generation in twenty exceeds.
        same_export: Whether the reference was made for this very file.
        nodes: How many nodes each provider of ONNX Runtime ran, where providers were asked for.
        beside: Whose answers it was compared with.
    """

    count: int
    largest: float
    typical: float
    tolerance: float
    p50_ms: float
    p95_ms: float
    same_export: bool
    nodes: Mapping[str, int] = field(default_factory=dict)
    beside: str = "its policy"

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
        verdict = f"agrees with {self.beside}" if self.agrees else "does NOT agree with the reference"
        other = "" if self.same_export else "; the reference was made for another export"
        return (
            f"{verdict}: {self.count} observations, actions differ by {self.largest:.1e} at most and {self.typical:.1e} "
            f"typically (tolerance {self.tolerance:g}; 1 is half of the range of actions){other}; one generation takes "
            f"{self.p50_ms:.1f} ms (p95 {self.p95_ms:.1f}){nodes_text(self.nodes)}"
        )


def nodes_text(nodes: Mapping[str, int]) -> str:
    """Behind a sentence: which provider runs how many nodes."""
    return "".join(f"; {name} runs {count} of {sum(nodes.values())} nodes" for name, count in nodes.items())


def reference_path(path: PathLike) -> Path:
    """Where the reference of an export lies, if it has one: NAME.reference.npz beside NAME.onnx.

    Args:
        path: The export, such as policy.onnx.
    """
    return Path(path).with_suffix(".reference.npz")


def export_hash(path: PathLike) -> str:
    """The hash that an export ends with: it tells files apart.

    Args:
        path: The export; 64 bytes or more.
    """
    with open(path, "rb") as file:
        file.seek(-64, os.SEEK_END)
        return file.read().decode(errors="replace")


def compare(policy: Export, reference: Reference, tolerance: float = TOLERANCE, full: bool = False) -> Parity:
    """Run every observation of a reference, one by one. A guard of the export neither judges them nor falls back.

    Args:
        policy: The opened export.
        reference: What the policy that it was made of answered.
        tolerance: The largest difference that is accepted.
        full: Whether to ask for full precision, of an export that falls back.
    """
    count, gaps, seconds = len(reference.action), [], []
    for place in [0, *range(count)]:  # the first twice: only the second call is warm
        obs = {name: value[place : place + 1] for name, value in reference.inputs.items()}
        started = time.perf_counter()
        try:
            noise = reference.noise[:, place : place + 1]
            found = policy.run(policy.check_observation(obs), noise, full=full)["action"]
        except ObservationError as error:
            raise OtherPolicyError(f"the reference is that of another policy: {error}") from error
        seconds.append(time.perf_counter() - started)
        if found.shape[1:] != reference.action.shape[1:]:
            raise OtherPolicyError(
                f"the reference is that of another policy: it has actions of shape {reference.action.shape[1:]}, the export "
                f"gives {found.shape[1:]}"
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
        nodes=policy.nodes,
    )


def _drawn_reference(policy: Export, full: bool) -> Reference:
    """What an export answers to drawn inputs, to compare another provider with.

    Args:
        policy: The export, opened with the provider that is trusted.
        full: Whether in full precision.
    """
    rng = np.random.default_rng(0)
    inputs = {
        name: (rng.random if name in policy.cameras else rng.standard_normal)((AT_START, *shape), dtype=np.float32)
        for name, shape in policy.inputs.items()
    }
    noise = policy.draw_noise(AT_START, rng, full)
    action = policy.run(policy.check_observation(inputs), noise, full=full)["action"]
    spread = np.ptp(action, axis=(0, 1))
    scale = np.where(spread > 0, 2 / np.where(spread > 0, spread, 1), 1).astype(np.float32)
    return Reference(export_hash(policy.path), inputs, noise, action, scale)


def check_at_start(policy: Export, trusted: Callable[[], Export], tolerance: float = TOLERANCE) -> Parity:
    """Refuse an export that answers otherwise on the providers that run it: beside the first recorded answers of its
    policy if a reference lies beside the file, else beside the CPU's answers to drawn inputs. What a guard falls back to has
    no recorded answers.

    Args:
        policy: The export, opened with providers.
        trusted: Opens it with the CPU's.
        tolerance: The largest difference that is accepted.
    """

    def beside_the_cpu(full: bool) -> Parity:
        found = compare(policy, _drawn_reference(trusted(), full), tolerance, full)
        return replace(found, beside="the CPU's answers")

    place = reference_path(policy.path)
    known = Reference.load(place).first(AT_START) if place.exists() else None
    found = beside_the_cpu(full=False) if known is None else compare(policy, known, tolerance)
    in_full = {" in full precision": beside_the_cpu(full=True)} if policy.falls_back else {}
    for which, one in {"": found, **in_full}.items():
        if not one.agrees:
            raise EngineError(
                f"{policy.path}{which} {one}; leave providers out, or accept more with a larger tolerance"
            )
    return found
