"""The onnx engine: a generation as one ONNX file, run by ONNX Runtime. What a robot deploys.

Files carry what they were made for (schedule and fingerprint); one that was made for another policy is refused. Exports
are kept on disk by fingerprint, so that the wait comes once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache._version import __version__
from blockcache.cores import cores
from blockcache.engines.build import Build
from blockcache.engines.cache import cache_directory, prune, source_hash
from blockcache.errors import EngineError, FileError, ObservationError
from blockcache.files import PathLike, expect_format, parse_json, read_bytes, write_bytes
from blockcache.fingerprint import Fingerprint
from blockcache.observations import Observation, check_observation

FORMAT, VERSION = "blockcache.onnx", 1
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


def export(build: Build, fingerprint: Fingerprint, path: PathLike, unrolled: bool = False) -> None:
    """Write one ONNX file, atomically. `fingerprint` is the policy's, in full; for `unrolled` see `build_graph`."""
    require_onnxruntime(also_onnx=True)
    from blockcache.engines.onnx_graph import build_graph

    metadata = {"blockcache": json.dumps(_header(build, fingerprint))}
    model = build_graph(build.program, build.plan, build.sampler, metadata, unrolled)
    write_bytes(path, model.SerializeToString())


def _header(build: Build, fingerprint: Fingerprint) -> dict[str, Any]:
    """What the file was made for."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "made_by": f"blockcache {__version__}",
        "output": "chunk" if build.program.whole else "action",
        "executed": list(build.program.executed),
        "schedule": {name: list(steps) for name, steps in build.schedule.updates.items()},
        "origin": dict(build.schedule.origin),
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
        header = parse_json(text.encode(), "ONNX file's header", self.path)
        expect_format(header, FORMAT, VERSION, "ONNX file", self.path)
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


def open_cached(build: Build, fingerprint: Fingerprint, threads: int | None) -> OnnxRunner:
    """A runner for just this policy, schedule and output, from the cache; made if it is not there or was cut short."""
    path = cache_directory() / f"{_digest(build, fingerprint)}.onnx"
    if path.exists():
        try:
            runner = OnnxRunner(path, threads)
        except FileError:
            pass  # made again below
        else:
            with contextlib.suppress(OSError):
                os.utime(path)  # was of use just now, see `prune`
            return runner
    export(build, fingerprint, path)
    runner = OnnxRunner(path, threads)
    prune(path.parent)
    return runner


def _digest(build: Build, fingerprint: Fingerprint) -> str:
    """One name for all that goes into a file: what the header says, and numbers that are in no fingerprint."""
    header = _header(build, fingerprint)
    del header["origin"]  # for the record only
    text = json.dumps([header, build.program.causal, build.program.signature, source_hash(type(build.program))])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
