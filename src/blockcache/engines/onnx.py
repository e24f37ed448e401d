"""The onnx engine: a generation as one ONNX file, run by ONNX Runtime. What a robot deploys.

Files carry what they were made for (schedule and fingerprint); one that was made for another policy is refused. Exports
are kept on disk by fingerprint, so that the wait comes once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.cores import cores
from blockcache.engines.compiled import CompiledPolicy
from blockcache.errors import EngineError, FileError, ObservationError
from blockcache.files import Format, PathLike, read_bytes, write_bytes
from blockcache.fingerprint import Fingerprint
from blockcache.observations import Observation, check_observation
from blockcache.schedule import Schedule
from blockcache.schedule.plan import compile_plan

FORMAT = Format(
    "blockcache.onnx",
    "ONNX file",
    {"output": str, "executed": list, "schedule": dict, "origin": dict, "fingerprint": object},
    again="export it again",
)
CACHE_BYTES = 2 * 10**9
_SINGLE = torch.empty(0, dtype=torch.float32)
MINIMUM = {"onnxruntime": (1, 23), "onnx": (1, 18)}
"""ONNX Runtime has the Attention operator on the CPU since 1.23; before 1.21 it copied a weight for each of its uses."""


def require_onnxruntime(also_onnx: bool = False) -> None:
    """Refuse a missing or an old library, naming the extra that brings it."""
    for package in ("onnxruntime", "onnx") if also_onnx else ("onnxruntime",):
        wanted = ".".join(map(str, MINIMUM[package]))
        hint = f'version {wanted} or newer comes with: pip install "blockcache[onnx]"'
        found = installed_version(package)
        if found is None:
            raise EngineError(f"the onnx engine needs {package}, which is not installed; {hint}")
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < MINIMUM[package]:
            raise EngineError(f"the onnx engine needs a newer {package} than the installed {found}; {hint}")


def installed_version(package: str) -> str | None:
    """The version that the module says it has: ONNX Runtime is also installed under names like onnxruntime-gpu."""
    try:
        return str(importlib.import_module(package).__version__)
    except (ImportError, AttributeError):  # AttributeError: an empty directory of that name
        return None


def export(
    policy: CompiledPolicy, schedule: Schedule, fingerprint: Fingerprint, path: PathLike, unrolled: bool = False
) -> None:
    """Write one ONNX file, atomically. `fingerprint` is the policy's, in full; for `unrolled` see `build_graph`."""
    require_onnxruntime(also_onnx=True)
    from blockcache.engines.onnx_graph import build_graph

    metadata = {"blockcache": FORMAT.text(_content(policy, schedule, fingerprint), path)}
    model = build_graph(policy, compile_plan(schedule), metadata, unrolled)
    write_bytes(path, model.SerializeToString())


def _content(policy: CompiledPolicy, schedule: Schedule, fingerprint: Fingerprint) -> dict[str, Any]:
    """What the file was made for."""
    return {
        "output": "chunk" if policy.whole else "action",
        "executed": list(policy.executed),
        "schedule": {name: list(steps) for name, steps in schedule.updates.items()},
        "origin": dict(schedule.origin),
        "fingerprint": fingerprint.to_dict(),
    }


class OnnxRunner:
    """`runner(obs, noise)` -> actions in robot units. Several threads may call it at once.

    obs (B, n_obs, obs) in robot units, noise (1 + draws, B, horizon, D): `sizes` gives the sizes, B is "batch".
    """

    def __init__(self, path: PathLike, threads: int | None = None) -> None:
        """Open an export. Without `threads`, one thread and all cores are tried and the faster one is taken."""
        require_onnxruntime()
        self.path = Path(path)
        if not self.path.is_file():
            read_bytes(self.path, "ONNX file")  # says what is wrong
        self.threads = 1 if threads is None else threads
        if self.threads < 1:
            raise EngineError(f"the onnx engine needs one thread at least, got {threads}")
        self.header, self._session = self._open(self.threads)
        self._outputs = [item.name for item in self._session.get_outputs()]
        self.sizes: dict[str, list[Any]] = {item.name: item.shape for item in self._session.get_inputs()}
        if threads is None and (many := cores()) > 1:
            _, other = self._open(many)
            if self._seconds(other) < self._seconds(self._session):
                self._session, self.threads = other, many

    def __call__(self, obs: Observation, noise: Tensor) -> dict[str, Tensor]:
        _, n_obs_steps, obs_dim = self.sizes["obs"]
        observed = check_observation(obs, n_obs_steps, obs_dim, _SINGLE)
        expected = [len(observed) if size == "batch" else size for size in self.sizes["noise"]]
        if list(noise.shape) != expected:
            raise ObservationError(f"noise has shape {tuple(noise.shape)}, expected {tuple(expected)}")
        feed = {"obs": observed.detach().numpy(), "noise": noise.detach().to(_SINGLE).numpy()}
        arrays = self._session.run(self._outputs, feed)
        return {name: torch.from_numpy(array) for name, array in zip(self._outputs, arrays, strict=True)}

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.from_dict(self.header["fingerprint"])

    def check(self, actual: Fingerprint, executed: tuple[int, int]) -> None:
        """Refuse to stand for another policy than the file was made from."""
        differences = [*self.fingerprint.differences(actual)]
        if tuple(self.header["executed"]) != executed:
            start, stop = self.header["executed"]
            differences.append(f"executed actions {executed[0]} to {executed[1] - 1} instead of {start} to {stop - 1}")
        if differences:
            raise EngineError(
                f"{self.path} was made for another policy, this one has {'; '.join(differences)}; export it again with "
                "'blockcache export'"
            )

    def _open(self, threads: int) -> tuple[dict[str, Any], Any]:
        import onnxruntime as ort

        try:
            session = ort.InferenceSession(os.fspath(self.path), _options(threads), providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own errors share no base class
            reason = str(error).splitlines()[0]
            raise FileError(
                f"cannot load the ONNX file {self.path} ({reason}); it may be cut short, export it again"
            ) from error
        text = session.get_modelmeta().custom_metadata_map.get("blockcache")
        if text is None:
            raise FileError(f"{self.path} is not an export of blockcache: it carries no schedule and fingerprint")
        header = FORMAT.parse(text, self.path)
        with FORMAT.reading(self.path):
            Fingerprint.from_dict(header["fingerprint"])
        return header, session

    def _seconds(self, session: Any) -> float:
        """The best of a few runs at batch 1."""
        feed = {
            item.name: np.zeros([1 if size == "batch" else size for size in item.shape], dtype=np.float32)
            for item in session.get_inputs()
        }
        best = float("inf")
        for _ in range(4):
            started = time.perf_counter()
            session.run([], feed)
            best = min(best, time.perf_counter() - started)
        return best


def _options(threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # planning the reuse of thousands of small buffers takes many seconds and saves nothing: the arena does it anyway
    options.enable_mem_reuse = False
    # between calls the worker threads sleep instead of burning a core that the robot needs
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return options


def open_cached(
    policy: CompiledPolicy, schedule: Schedule, fingerprint: Fingerprint, threads: int | None
) -> OnnxRunner:
    """A runner for just this policy, schedule and output, from the cache; made if it is not there or was cut short."""
    path = cache_directory() / f"{_digest(policy, schedule, fingerprint)}.onnx"
    if path.exists():
        try:
            runner = OnnxRunner(path, threads)
        except FileError:
            pass  # made again below
        else:
            with contextlib.suppress(OSError):
                os.utime(path)  # was of use just now, see _prune
            return runner
    export(policy, schedule, fingerprint, path)
    runner = OnnxRunner(path, threads)
    _prune(path.parent)
    return runner


def _digest(policy: CompiledPolicy, schedule: Schedule, fingerprint: Fingerprint) -> str:
    """One name for all that goes into a file: what the header says, and numbers that are in no fingerprint."""
    header = {**FORMAT.header, **_content(policy, schedule, fingerprint)}
    del header["origin"]  # for the record only
    digest = hashlib.sha256(json.dumps([header, policy.norm_eps, policy.causal, _source_hash()]).encode())
    for tensor in (policy.time_tokens, policy.self_mask, policy.memory_mask):  # a foreign policy may make them in code
        digest.update(b"none" if tensor is None else tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


@functools.cache
def _source_hash() -> str:
    """Of the code that makes the file: an export by an older state of it is made again."""
    package = resources.files("blockcache")
    rooms = ("engines", "models/dpt", "samplers", "schedule")
    files = [file for room in rooms for file in package.joinpath(room).iterdir()]
    texts = [file.read_bytes() for file in sorted(files, key=str) if file.name.endswith(".py")]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _prune(directory: Path) -> None:
    """Once its exports take more than `CACHE_BYTES`, delete those that were of no use for longest; the newest stays."""
    with contextlib.suppress(OSError):  # another process prunes too, or holds a file open on Windows: next time
        ours = directory.glob("[0-9a-f]" * 32 + ".onnx")
        newest, *others = sorted(((path.stat(), path) for path in ours), key=lambda file: -file[0].st_mtime_ns)
        room = CACHE_BYTES - newest[0].st_size
        for facts, path in others:
            room -= facts.st_size
            if room < 0:
                path.unlink()


def cache_directory() -> Path:
    """`BLOCKCACHE_CACHE`, or `blockcache` under the user's cache directory; a temporary one if that cannot be written."""
    try:
        chosen = os.environ.get("BLOCKCACHE_CACHE")
        base = os.environ.get("XDG_CACHE_HOME")
        directory = Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "blockcache"
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError):  # RuntimeError: a container's user may have no home
        return _temporary_directory()


def _temporary_directory() -> Path:
    """The same one for every process of this user; never one that another user made, whose files would be run."""
    user = os.getuid() if hasattr(os, "getuid") else ""
    directory = Path(tempfile.gettempdir()) / f"blockcache-{user}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if user != "" and directory.stat().st_uid != user:
        return Path(tempfile.mkdtemp(prefix="blockcache-"))
    return directory
