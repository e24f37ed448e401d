"""Opening an export: the one place where a file is checked and becomes something that runs.

Knows which libraries that takes, how ONNX Runtime is set up and how many threads are worth it, and nothing of what goes
in and out.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from blockcache_runtime.cores import cores
from blockcache_runtime.errors import ContentError, EngineError, FileError, in_one_line
from blockcache_runtime.extras import require
from blockcache_runtime.files import Count, Fields, Format, Limit, Name, read_bytes
from blockcache_runtime.fingerprint import Fingerprint
from blockcache_runtime.graph import check_model, read_metadata
from blockcache_runtime.integrity import has_hash, is_intact
from blockcache_runtime.part import part_for

T = TypeVar("T")


@dataclass(frozen=True)
class Encoder:
    """Of a policy with cameras: what an export must say for its frames to be looked at moment by moment.

    cameras      its inputs that are frames
    n_obs_steps  moments that the policy looks at
    features     numbers that all cameras together become in one moment
    """

    cameras: tuple[str, ...]
    n_obs_steps: int
    features: int


FORMAT = Format(
    "blockcache.onnx",
    "ONNX file",
    {
        "output": str,
        "executed": Annotated[list[Count], Limit(2, 2)],
        "inputs": dict,
        "outputs": dict,
        "schedule": dict[str, list[Count]],
        "origin": dict,
        "fingerprint": dict,
        "build": str,
        "encoder": Fields(
            {
                "cameras": Annotated[list[Name], Limit(1, 100)],
                "n_obs_steps": Annotated[int, Limit(1, 10_000)],
                "features": Annotated[int, Limit(1, 2**24)],
            }
        ),
    },
    optional=("build", "encoder"),
    version=3,  # 1 had no hash, 2 one norm a row
    again="export it again",
)
KEPT = "kept_features"
"""The input of an export with cameras that takes what earlier moments showed."""
MOST_BYTES = 2**31 - 1
"""Protobuf has no larger files."""
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
    encoder: Encoder | None
    session: Any
    threads: int


def open_file(path: Path, threads: int | None, data: bytes | None = None) -> OpenFile:
    """Check the file and load it; nothing in it is run for that. ONNX Runtime gets it once it has the form of an export, and
    while it is being loaded its hash is computed beside: a graph of that form does no harm, whatever its numbers.

    path     where it is, or for `data` is going to be
    threads  without it, one thread and all cores are tried and the faster one is taken
    data     its content, where that is at hand
    """
    require_onnxruntime()
    if threads is not None and threads < 1:
        raise EngineError(f"the onnx engine needs one thread at least, got {threads}")
    data = read_bytes(path, "ONNX file", MOST_BYTES) if data is None else data
    found = _if_intact(data, path, lambda: _opened(data, path, threads or 1))
    if threads is None and (many := cores()) > 1:
        other = _load(data, path, many)
        if seconds_per_run(other, found.encoder) < seconds_per_run(found.session, found.encoder):
            return replace(found, session=other, threads=many)
    return found


def _if_intact(data: bytes, path: Path, make: Callable[[], T]) -> T:
    """What is made of a file, if its hash is right. That it is damaged comes before what follows from it, unless there is
    no hash at all: then it is cut short, of another version or no export."""
    problem: FileError | None = None
    with ThreadPoolExecutor(1) as aside:
        intact = aside.submit(is_intact, data)
        try:
            found = make()
        except FileError as error:
            problem = error
    if problem is not None and (intact.result() or not has_hash(data)):
        raise problem
    if not intact.result():
        raise FileError(f"the ONNX file {path} was changed or damaged after it was written; export it again")
    return found


def _opened(data: bytes, path: Path, threads: int) -> OpenFile:
    """The file, once its header and its graph are in order."""
    header, fingerprint, executed = _read_header(data, path)
    with FORMAT.reading(path):
        check_model(data)
    said = header.get("encoder")
    encoder = None if said is None else Encoder(tuple(said["cameras"]), said["n_obs_steps"], said["features"])
    session = _load(data, path, threads)
    with FORMAT.reading(path):
        _check_declarations(session, header, executed, encoder)
    return OpenFile(header, fingerprint, executed, encoder, session, threads)


def _read_header(data: bytes, path: Path) -> tuple[dict[str, Any], Fingerprint, tuple[int, int]]:
    """What the file says of itself."""
    with FORMAT.reading(path):
        text = read_metadata(data).get("blockcache")
    if text is None:
        raise FileError(f"{path} is not an export of blockcache: it carries no schedule and fingerprint")
    header = {**FORMAT.parse(text, path), "made_by": json.loads(text)["made_by"]}
    with FORMAT.reading(path):
        fingerprint = Fingerprint.from_dict(header["fingerprint"])
        start, stop = header["executed"]
        if not start < stop:
            raise ContentError(f"executed is the first action and the one behind the last, got {[start, stop]}")
        if header["output"] not in ("chunk", "action"):
            raise ContentError(f"its output is {reprlib.repr(header['output'])}, expected 'chunk' or 'action'")
    return header, fingerprint, (start, stop)


def _check_declarations(
    session: Any, header: Mapping[str, Any], executed: tuple[int, int], encoder: Encoder | None
) -> None:
    """The graph must take and give what the header says, and that must be observations, noise and actions."""
    items = (*session.get_inputs(), *session.get_outputs())
    if any(item.type != "tensor(float)" for item in items):
        raise ContentError("not all that goes in and out of it is float32")
    inputs, outputs = (
        {item.name: item.shape for item in items} for items in (session.get_inputs(), session.get_outputs())
    )
    if (inputs, outputs) != (header["inputs"], header["outputs"]):
        raise ContentError("its graph has other inputs or outputs than its header tells of")
    noise, action, whole = inputs.pop("noise", []), outputs.pop("action", []), outputs.pop("action_pred", None)
    norms = outputs.pop("norms", None)  # without them nobody would notice what was not finite on the way
    looks = _looks(encoder, inputs, outputs) if encoder is not None else bool(inputs)
    right = (
        (looks and all(len(shape) >= 2 and _fits(shape) for shape in inputs.values()))
        and (len(noise) == 4 and _fits([noise[1], noise[0], *noise[2:]]))
        and (len(action) == 3 and _fits(action) and action[1] == executed[1] - executed[0])
        and ((whole is not None) == (header["output"] == "chunk") and norms == [1] and not outputs)
        and (whole is None or (len(whole) == 3 and _fits(whole) and whole[1] >= executed[1] and whole[2] == action[2]))
    )
    if not right:
        raise ContentError("it does not turn observations and noise into the actions that its header tells of")


def _looks(encoder: Encoder, inputs: dict[str, Any], outputs: dict[str, Any]) -> bool:
    """Whether there is what the encoder of an export takes and gives; takes it out of inputs and outputs."""
    kept, given = inputs.pop(KEPT, []), outputs.pop("features", [])
    frames = [inputs.pop(name, []) for name in encoder.cameras]
    return (
        kept == ["kept", "batch", encoder.features]
        and given == [encoder.n_obs_steps, "batch", encoder.features]
        and all(len(shape) == 5 and shape[0] == "moments" and _fits(shape[1:]) for shape in frames)
    )


def _fits(shape: Sequence[Any]) -> bool:
    """A batch of things of one size."""
    return shape[0] == "batch" and all(type(size) is int and size > 0 for size in shape[1:])


def _load(data: bytes, path: Path, threads: int) -> Any:
    try:
        return new_session(data, threads)
    except Exception as error:  # ONNX Runtime's own errors share no base class
        raise FileError(f"cannot load the ONNX file {path} ({in_one_line(error)}); export it again") from error


def new_session(data: bytes, threads: int) -> Any:
    """A session for a serialised model, set up as all ours are."""
    import onnxruntime as ort

    # without enable_fallback=0 it prints, and tries again without the options
    session = ort.InferenceSession(data, _options(threads), providers=["CPUExecutionProvider"], enable_fallback=0)
    session._model_bytes = None  # it would keep the file's bytes for as long as it lives
    return session


def _options(threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # nothing is left to fuse in our graphs: without trying they load twice as fast and run a little faster, in the order in
    # which they are written. Nor is any part of them run for folding it
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # planning the reuse of thousands of small buffers takes many seconds and saves nothing: the arena does it anyway
    options.enable_mem_reuse = False
    # between calls the worker threads sleep instead of burning a core that the robot needs
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry(
        "session.load_model_format", "ONNX"
    )  # it would go by the first bytes, as we do not
    options.log_severity_level = 3
    return options


def open_part(path: Path, like: OpenFile, output: str) -> Any:
    """A session for one output of a file that was opened before, without what that output does not need."""
    data = read_bytes(path, "ONNX file", MOST_BYTES)

    def part() -> Any:
        if _read_header(data, path)[0] != like.header:
            raise FileError(f"the ONNX file {path} is another one than it was when it was opened; open it again")
        with FORMAT.reading(path):
            check_model(data)
        return _load(part_for(data, output), path, like.threads)

    return _if_intact(data, path, part)


def run_session(session: Any, outputs: list[str], feed: Mapping[str, Any]) -> list[Any]:
    """One run of a session on what was checked already; if it fails, in one sentence."""
    try:
        return session.run(outputs, feed)  # type: ignore[no-any-return]
    except Exception as error:  # ONNX Runtime's own errors share no base class
        reason = in_one_line(error)
        raise EngineError(
            f"ONNX Runtime cannot run this ({reason}); take a smaller batch, or export it again"
        ) from error


def seconds_per_run(session: Any, encoder: Encoder | None = None) -> float:
    """The best of a few runs at batch 1; all moments are looked at."""
    sizes = {"batch": 1, "kept": 0, "moments": 0 if encoder is None else encoder.n_obs_steps}
    feed = {
        item.name: np.zeros([sizes.get(size, size) for size in item.shape], dtype=np.float32)
        for item in session.get_inputs()
    }
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        run_session(session, [], feed)
        best = min(best, time.perf_counter() - started)
    return best
