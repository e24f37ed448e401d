"""The onnx engine's files: a generation as one ONNX graph. Knows nothing of how it is run.

Files carry what they were made for (schedule and fingerprint); one that was made for another policy is refused. Exports
are kept on disk by fingerprint, so that the wait comes once.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
from typing import Any

from blockcache.deploy.session import FORMAT, require_onnxruntime
from blockcache.engines.build import Build
from blockcache.engines.cache import cache_directory, prune, source_hash
from blockcache.engines.onnx_runner import OnnxRunner
from blockcache.errors import FileError
from blockcache.files import PathLike, write_bytes
from blockcache.fingerprint import Fingerprint


def export(build: Build, fingerprint: Fingerprint, path: PathLike, unrolled: bool = False) -> None:
    """Write one ONNX file, atomically. `fingerprint` is the policy's, in full; for `unrolled` see `build_graph`."""
    require_onnxruntime(also_onnx=True)
    from blockcache.engines.onnx_graph import build_graph

    metadata = {"blockcache": FORMAT.text(_content(build, fingerprint), path)}
    model = build_graph(build.program, build.plan, build.sampler, metadata, unrolled)
    write_bytes(path, model.SerializeToString())


def _content(build: Build, fingerprint: Fingerprint) -> dict[str, Any]:
    """What the file was made for."""
    return {
        "output": "chunk" if build.program.whole else "action",
        "executed": list(build.program.executed),
        "schedule": {name: list(steps) for name, steps in build.schedule.updates.items()},
        "origin": dict(build.schedule.origin),
        "fingerprint": fingerprint.to_dict(),
    }


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
    header = {**FORMAT.header, **_content(build, fingerprint)}
    del header["origin"]  # for the record only
    text = json.dumps(
        [header, build.program.causal, build.program.signature, source_hash(inspect.getfile(type(build.program)))]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]
