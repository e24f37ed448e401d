"""The onnx engine's files: a generation as one ONNX graph. Knows nothing of how it is run.

Files carry what they were made for (schedule and fingerprint); one that was made for another policy is refused. Exports
are kept on disk by fingerprint, so that the wait comes once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from blockcache._version import __version__
from blockcache.deploy.session import FORMAT, VERSION, require_onnxruntime
from blockcache.engines.compiled import CompiledPolicy
from blockcache.engines.onnx_runner import OnnxRunner
from blockcache.errors import FileError
from blockcache.files import PathLike, write_bytes
from blockcache.fingerprint import Fingerprint
from blockcache.schedule import Schedule
from blockcache.schedule.plan import compile_plan

CACHE_BYTES = 2 * 10**9


def export(
    policy: CompiledPolicy, schedule: Schedule, fingerprint: Fingerprint, path: PathLike, unrolled: bool = False
) -> None:
    """Write one ONNX file, atomically. `fingerprint` is the policy's, in full; for `unrolled` see `build_graph`."""
    require_onnxruntime(also_onnx=True)
    from blockcache.engines.onnx_graph import build_graph

    metadata = {"blockcache": json.dumps(_header(policy, schedule, fingerprint))}
    model = build_graph(policy, compile_plan(schedule), metadata, unrolled)
    write_bytes(path, model.SerializeToString())


def _header(policy: CompiledPolicy, schedule: Schedule, fingerprint: Fingerprint) -> dict[str, Any]:
    """What the file was made for."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "made_by": f"blockcache {__version__}",
        "output": "chunk" if policy.whole else "action",
        "executed": list(policy.executed),
        "schedule": {name: list(steps) for name, steps in schedule.updates.items()},
        "origin": dict(schedule.origin),
        "fingerprint": fingerprint.to_dict(),
    }


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
    header = _header(policy, schedule, fingerprint)
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
