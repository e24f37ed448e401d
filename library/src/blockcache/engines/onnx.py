"""The onnx engine's files: a generation as one ONNX graph. Knows nothing of how it is run.

Files carry what they were made for (schedule and fingerprint); one that was made for another policy is refused. Exports
are kept on disk by fingerprint, so that the wait comes once.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

from blockcache.cache import cache_directory, prune, source_hash
from blockcache.engines.build import Build
from blockcache.engines.onnx_runner import OnnxRunner
from blockcache.errors import ContentError, EngineError, FileError
from blockcache.files import PathLike, write_bytes
from blockcache.models.program import Program
from blockcache_runtime.fingerprint import Fingerprint
from blockcache_runtime.graph import check_model
from blockcache_runtime.integrity import with_hash
from blockcache_runtime.session import FORMAT, MOST_BYTES, require_onnxruntime

_logger = logging.getLogger("blockcache")


def require_size(program: Program) -> None:
    """Refuse weights that no file can hold, before they are hashed and copied."""
    held = 4 * sum(tensor.numel() for tensor in program.weights.values())
    if held > MOST_BYTES:
        raise EngineError(
            f"the onnx engine writes one file of {MOST_BYTES / 1e9:.1f} GB at most, and these weights take "
            f'{held / 1e9:.1f} GB; use engine="loop"'
        )


def export(build: Build, fingerprint: Fingerprint, path: PathLike, unrolled: bool = False) -> None:
    """Write one ONNX file, atomically. `fingerprint` is the policy's, in full; for `unrolled` see `build_graph`."""
    write_bytes(path, _file(build, _content(build, fingerprint), path, unrolled))


def _file(build: Build, content: dict[str, Any], path: PathLike, unrolled: bool = False) -> bytes:
    """The content of a file: graph, header and hash, looked at as whoever opens it will do it."""
    require_onnxruntime(also_onnx=True)
    from blockcache.engines.onnx_graph import build_graph, declared

    model = build_graph(build.program, build.plan, build.sampler, unrolled)
    model.metadata_props.add(key=FORMAT.entry, value=FORMAT.text({**content, **declared(model)}, path))
    data = with_hash(model.SerializeToString())
    try:
        check_model(data)
    except ContentError as error:
        raise EngineError(f"the onnx engine cannot open what it would write for this policy ({error})") from error
    return data


def _content(build: Build, fingerprint: Fingerprint) -> dict[str, Any]:
    """What the file was made for."""
    return {
        "output": "chunk" if build.program.whole else "action",
        "executed": list(build.program.executed),
        "schedule": {name: list(steps) for name, steps in build.schedule.updates.items()},
        "origin": dict(build.schedule.origin),
        "fingerprint": fingerprint.to_dict(),
        **({"encoder": _encoder(build.program)} if build.program.cameras else {}),
    }


def _encoder(program: Program) -> dict[str, Any]:
    """What a reader must know of cameras that look at moments one by one."""
    moments = program.inputs[program.cameras[0]][0]
    return {"cameras": list(program.cameras), "n_obs_steps": moments, "features": program.features}


def open_cached(build: Build, fingerprint: Fingerprint, threads: int | None) -> OnnxRunner:
    """A runner for just this policy, schedule and output, from the cache; made if there is none that is whole and right."""
    content = {**_content(build, fingerprint), "build": _digest(build, fingerprint)}
    path = cache_directory() / f"{content['build']}.onnx"
    if path.exists() and (kept := _open_kept(path, content, threads)) is not None:
        return kept
    data = _file(build, content, path)
    runner = OnnxRunner(path, threads, data)
    try:
        write_bytes(path, data)
    except FileError as error:
        _logger.warning("an export was made but cannot be kept for the next time: %s", error)
    else:
        prune(path.parent)
    return runner


def _open_kept(path: Path, content: dict[str, Any], threads: int | None) -> OnnxRunner | None:
    """None if this file is not what it should be, in whatever way: nobody wrote it by hand, so nobody needs to know."""
    try:
        runner = OnnxRunner(path, threads)
    except Exception:  # an error here would come back with every start
        return None
    expected = json.loads(json.dumps({**content, "origin": runner.header["origin"]}))  # whose origin, is no matter
    if any(runner.header.get(key) != value for key, value in expected.items()):
        return None  # an export of something else, under this name
    with contextlib.suppress(OSError):
        os.utime(path)  # was of use just now, see `prune`
    return runner


def _digest(build: Build, fingerprint: Fingerprint) -> str:
    """One name for all that goes into a file: what the header says, and numbers that are in no fingerprint."""
    header = {**FORMAT.header, **_content(build, fingerprint)}
    del header["origin"]  # for the record only
    text = json.dumps(
        [header, build.program.causal, build.program.signature, source_hash(inspect.getfile(type(build.program)))]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]
