"""Opening an export: the one place where a file is checked and becomes something that runs.

Knows which libraries that takes, how ONNX Runtime is set up and how many threads are worth it, and nothing of what goes
in and out.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from blockcache.cores import cores
from blockcache.errors import EngineError, FileError
from blockcache.extras import require
from blockcache.files import Count, Format, Limit, opened
from blockcache.fingerprint import Fingerprint

FORMAT = Format(
    "blockcache.onnx",
    "ONNX file",
    {
        "output": str,
        "executed": Annotated[list[Count], Limit(2, 2)],
        "schedule": dict[str, list[Count]],
        "origin": dict,
        "fingerprint": dict,
    },
    again="export it again",
)
MINIMUM = {"onnxruntime": (1, 23), "onnx": (1, 18)}
"""ONNX Runtime has the Attention operator on the CPU since 1.23; before 1.21 it copied a weight for each of its uses."""


def require_onnxruntime(also_onnx: bool = False) -> None:
    """Refuse a missing or an old library, naming the extra that brings it. `also_onnx`: a file is to be written."""
    for package in ("onnxruntime", "onnx") if also_onnx else ("onnxruntime",):
        require(package, "onnx", "the onnx engine", error=EngineError, minimum=MINIMUM[package])


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A checked export: what it says of itself, and a session of ONNX Runtime with its number of threads."""

    header: dict[str, Any]
    fingerprint: Fingerprint
    executed: tuple[int, int]
    session: Any
    threads: int


def open_file(path: Path, threads: int | None) -> OpenFile:
    """Check the file and load it. Without `threads`, one thread and all cores are tried and the faster one is taken."""
    require_onnxruntime()
    if threads is not None and threads < 1:
        raise EngineError(f"the onnx engine needs one thread at least, got {threads}")
    with opened(path, "ONNX file"):  # says what is wrong with the place
        pass
    chosen = threads or 1
    session = _load(path, chosen)
    header, fingerprint, executed = _read_header(session, path)
    if threads is None and (many := cores()) > 1:
        other = _load(path, many)
        if seconds_per_run(other) < seconds_per_run(session):
            session, chosen = other, many
    return OpenFile(header, fingerprint, executed, session, chosen)


def _load(path: Path, threads: int) -> Any:
    import onnxruntime as ort

    try:
        return ort.InferenceSession(os.fspath(path), _options(threads), providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own errors share no base class
        reason = str(error).splitlines()[0]
        raise FileError(f"cannot load the ONNX file {path} ({reason}); it may be cut short, export it again") from error


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


def _read_header(session: Any, path: Path) -> tuple[dict[str, Any], Fingerprint, tuple[int, int]]:
    """What the file was made for; the graph must have the inputs and outputs that go with it."""
    text = session.get_modelmeta().custom_metadata_map.get("blockcache")
    if text is None:
        raise FileError(f"{path} is not an export of blockcache: it carries no schedule and fingerprint")
    header = {**FORMAT.parse(text, path), "made_by": json.loads(text)["made_by"]}
    with FORMAT.reading(path):
        fingerprint = Fingerprint.from_dict(header["fingerprint"])
        start, stop = header["executed"]
    ranks = {item.name: len(item.shape) for item in (*session.get_inputs(), *session.get_outputs())}
    noise, action, pred = (ranks.pop(name, None) for name in ("noise", "action", "action_pred"))
    if (noise, action) != (4, 3) or pred not in (None, 3) or not ranks or min(ranks.values()) < 2:
        raise FileError(f"{path} is not an export of blockcache: it does not turn observations and noise into actions")
    return header, fingerprint, (start, stop)


def seconds_per_run(session: Any) -> float:
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
