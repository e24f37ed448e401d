"""Opening an export: the one place where a file is checked and becomes something that runs.

Knows how ONNX Runtime is set up and how many threads are worth it, and nothing of what goes in and out.
"""

from __future__ import annotations

import hashlib
import json
import platform
import reprlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from blockcache_runtime.chunks import TOLD
from blockcache_runtime.cores import cores
from blockcache_runtime.errors import ContentError, EngineError, FileError, in_one_line
from blockcache_runtime.fields import Count, Limit, Name
from blockcache_runtime.files import Format, read_bytes
from blockcache_runtime.fingerprint import Fingerprint
from blockcache_runtime.graph import check_model, model_for, read_metadata
from blockcache_runtime.guard import FULL, Guard
from blockcache_runtime.memory import Remembered
from blockcache_runtime.providers import (
    Provider,
    check_providers,
    new_session,
    nodes_of,
    require_onnxruntime,
    run_session,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Encoder:
    """What the export of a policy with cameras must say, so that frames are encoded one moment at a time."""

    cameras: Annotated[tuple[Name, ...], Limit(1, 100)]  # the inputs that are frames
    n_obs_steps: Annotated[int, Limit(1, 10_000)]  # moments that the policy looks at
    features: Annotated[int, Limit(1, 2**24)]  # numbers that all cameras together become in one moment


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
        "encoder": Encoder,
        "outside": Annotated[dict[Name, str], Limit(1, 100)],
        "fixed": dict[Name, list[float]],
        "guard": Guard,
    },
    optional=("build", "encoder", "outside", "fixed", "guard"),
    version=3,  # 1 had no hash, 2 one norm a row
    again="export it again",
)
EARLIER_FEATURES = "kept_features"
"""The input of an export with cameras that takes the features of earlier frames, which are not encoded again."""
IN_FULL = "full_"
"""Before the names of what an export gives in full precision, and of the noise for that, where its guard asks for it."""
MOST_BYTES = 2**31 - 1  # protobuf has no larger files
RATE_HZ = 10.0  # calls a second, for which the number of threads is chosen
TRIAL_SECONDS, ROUNDS = 2.0, 4  # how long one thread and all cores are tried, at most
MINIMUM = (1, 23)  # ONNX Runtime has the Attention operator on the CPU since then

# The hash of an export is its last metadata entry, over every byte before it: metadata_props {key: HASH, value: 64 digits}.
# Protobuf merges what is appended, so the entry is laid behind the file. It finds accidents: a flipped bit, a file that was
# cut short, an edit. It is no signature: who changes a file on purpose can write a hash that fits.
HASH = "blockcache.sha256"
_ENTRY = b"\x72\x55\x0a\x11" + HASH.encode() + b"\x12\x40"
_ENTRY_LENGTH = len(_ENTRY) + 64


@dataclass(frozen=True, eq=False)
class LoadedExport:
    """A checked export: what it says of itself, and a session of ONNX Runtime with its number of threads. `nodes` counts
    those of each provider, where providers were asked for; `full` is the session that answers in full precision."""

    header: dict[str, Any]
    fingerprint: Fingerprint
    encoder: Encoder | None
    session: Any
    threads: int
    providers: tuple[Provider, ...] = ()
    nodes: Mapping[str, int] = field(default_factory=dict)
    full: Any = None

    @property
    def sizes(self) -> dict[str, list[Any]]:
        """What a generation takes: of frames all moments, behind the batch, and no features."""
        sizes = {item.name: item.shape for item in self.session.get_inputs()}
        if self.encoder is not None:
            del sizes[EARLIER_FEATURES]
            sizes |= {name: ["batch", self.encoder.n_obs_steps, *sizes[name][2:]] for name in self.encoder.cameras}
        return sizes


def load_export(
    path: Path,
    threads: int | None,
    data: bytes | None = None,
    rate_hz: float = RATE_HZ,
    providers: Sequence[Provider] = (),
) -> LoadedExport:
    """Check the file and load it; nothing in it is run for that.

    ONNX Runtime gets it once it has the form of an export, and its hash is computed while it is being loaded: a graph of
    that form does no harm, whatever its numbers.

    Args:
        path: Where it is, or for `data` is going to be.
        threads: How many to use; without it one thread and all cores are tried once, and what was faster is kept.
        data: Its content, where that is at hand.
        rate_hz: How many generations a second will be asked for: so they are tried.
        providers: Execution providers of ONNX Runtime, in order of preference; none for the CPU.
    """
    require_onnxruntime(MINIMUM)
    if providers:
        check_providers(providers)
    if threads is not None and threads < 1:
        raise EngineError(f"the onnx engine needs one thread at least, got {threads}")
    if not 0 < rate_hz < float("inf"):
        raise EngineError(f"rate_hz is calls a second, more than 0, got {rate_hz}")
    data = read_bytes(path, "ONNX file", MOST_BYTES) if data is None else data
    found = _if_intact(data, path, lambda: _loaded(data, path, threads or 1, (*providers,)))
    found = _with_faster_threads(found, data, path, rate_hz) if threads is None and cores() > 1 else found
    if not _falls_back(found.header):
        return found
    full = _session(_part(data, found.header, full=True), path, found.threads, found.providers)
    with FORMAT.reading(path):
        _check_declarations(full, found.header, found.encoder, full=True)
    return replace(found, full=full)


def _falls_back(header: Mapping[str, Any]) -> bool:
    return "guard" in header and header["guard"].action == FULL


def _outputs(header: Mapping[str, Any], full: bool) -> list[str]:
    return [name for name in header["outputs"] if not _falls_back(header) or name.startswith(IN_FULL) == full]


def _part(data: bytes, header: Mapping[str, Any], full: bool = False) -> bytes:
    """The model that makes an export's answers as a rule, or the one that makes them in full precision."""
    return model_for(data, _outputs(header, full)) if _falls_back(header) else data


def _with_faster_threads(one: LoadedExport, data: bytes, path: Path, rate_hz: float) -> LoadedExport:
    """The export with one thread, or with all cores if these were faster; tried once for each file, rate and machine."""
    machine = [platform.node(), platform.machine(), require_onnxruntime(MINIMUM)]
    known = Remembered("threads", data[-64:].decode(), cores(), rate_hz, repr(one.providers), *machine)
    chosen = known.get((1, cores()))
    if chosen == 1:
        return one
    many = replace(one, session=_session(_part(data, one.header), path, cores(), one.providers), threads=cores())
    if chosen is None:
        chosen = many.threads if prefers_second(one.session, many.session, one.encoder, rate_hz) else 1
        known.keep(chosen)
    return many if chosen > 1 else one


def load_output(path: Path, like: LoadedExport, output: str) -> Any:
    """A session for one output of a file that was loaded before, without what that output does not need.

    Args:
        path: The file.
        like: What `load_export` made of it; threads and providers are the same.
        output: The name of the output in the graph, such as "features".
    """
    data = read_bytes(path, "ONNX file", MOST_BYTES)

    def load() -> Any:
        if _checked_header(data, path)[0] != like.header:
            raise FileError(f"the ONNX file {path} is another one than it was when it was opened; open it again")
        return _session(model_for(data, [output]), path, like.threads, like.providers)

    return _if_intact(data, path, load)


def _if_intact(data: bytes, path: Path, make: Callable[[], T]) -> T:
    """What is made of a file, if its hash is right. Of a file with a wrong hash the error says that it is damaged, whatever
    else `make` found; a file without any hash is cut short, of another version or no export, as `make` says."""
    problem: FileError | None = None
    with ThreadPoolExecutor(1) as aside:
        intact = aside.submit(is_intact, data)
        try:
            found = make()
        except FileError as error:
            problem = error
    if problem is not None and (intact.result() or data[-_ENTRY_LENGTH:-64] != _ENTRY):
        raise problem
    if not intact.result():
        raise FileError(f"the ONNX file {path} was changed or damaged after it was written; export it again")
    return found


def with_hash(content: bytes) -> bytes:
    """A serialised model with its hash behind it; the model must have none yet.

    Args:
        content: The model, serialised.
    """
    return content + _hash_entry(content)


def is_intact(data: bytes) -> bool:
    """Whether a file is, byte by byte, what `with_hash` made."""
    return data[-_ENTRY_LENGTH:] == _hash_entry(memoryview(data)[:-_ENTRY_LENGTH])


def _hash_entry(content: bytes | memoryview) -> bytes:
    # of the hashes in Python's library the fastest on processors with SHA instructions, which robots' have, too
    return _ENTRY + hashlib.sha256(content).hexdigest().encode()


def _loaded(data: bytes, path: Path, threads: int, providers: tuple[Provider, ...]) -> LoadedExport:
    header, fingerprint = _checked_header(data, path)
    encoder = header.get("encoder")
    session = _session(_part(data, header), path, threads, providers)
    with FORMAT.reading(path):
        _check_declarations(session, header, encoder)
    nodes = nodes_of(session, providers) if providers else {}
    return LoadedExport(header, fingerprint, encoder, session, threads, providers, nodes)


def _checked_header(data: bytes, path: Path) -> tuple[dict[str, Any], Fingerprint]:
    """What the file says of itself, once that and its graph are in order."""
    with FORMAT.reading(path):
        text = read_metadata(data).get(FORMAT.entry)
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
        check_model(data)
    return header, fingerprint


def _check_declarations(session: Any, header: Mapping[str, Any], encoder: Encoder | None, full: bool = False) -> None:
    """The graph must take and give what the header says, and that must be observations, noise and actions."""
    if any(item.type != "tensor(float)" for item in (*session.get_inputs(), *session.get_outputs())):
        raise ContentError("not all that goes in and out of it is float32")
    before, declared = IN_FULL if full else "", (session.get_inputs(), session.get_outputs())
    inputs, outputs = ({item.name: item.shape for item in items} for items in declared)
    other = f"{'' if full else IN_FULL}noise" if _falls_back(header) else None  # the other part takes it
    told = {name: shape for name, shape in header["inputs"].items() if name != other}
    if (inputs, outputs) != (told, {name: header["outputs"][name] for name in _outputs(header, full)}):
        raise ContentError("its graph has other inputs or outputs than its header tells of")
    start, stop = header["executed"]
    outputs = {name.removeprefix(before): shape for name, shape in outputs.items()}
    noise, action, whole = inputs.pop(f"{before}noise", []), outputs.pop("action", []), outputs.pop("action_pred", None)
    rtc = [shape for name in TOLD if (shape := inputs.pop(name, None)) is not None]
    norms = outputs.pop("norms", None)  # without them nobody would notice what was not finite on the way
    observes = bool(inputs) if encoder is None else _takes_frames(encoder, inputs, outputs)
    right = (
        (observes and all(len(shape) >= 2 and _is_batch(shape) for shape in inputs.values()))
        and (len(noise) == 4 and _is_batch([noise[1], noise[0], *noise[2:]]))
        and (len(action) == 3 and _is_batch(action) and action[1] == stop - start)
        and (not rtc or (rtc == [["batch", *rtc[0][1:2], action[2]], ["batch"], ["batch"]] and _is_batch(rtc[0])))
        and ((whole is not None) == (header["output"] == "chunk") and norms == [1] and not outputs)
        and (whole is None or (len(whole) == 3 and _is_batch(whole) and whole[1] >= stop and whole[2] == action[2]))
    )
    if not right:
        raise ContentError("it does not turn observations and noise into the actions that its header tells of")


def _takes_frames(encoder: Encoder, inputs: dict[str, Any], outputs: dict[str, Any]) -> bool:
    """Whether there is what the encoder of an export takes and gives; takes it out of inputs and outputs."""
    earlier, features = inputs.pop(EARLIER_FEATURES, []), outputs.pop("features", [])
    frames = [inputs.pop(name, []) for name in encoder.cameras]
    return (
        earlier == ["kept", "batch", encoder.features]
        and features == [encoder.n_obs_steps, "batch", encoder.features]
        and all(len(shape) == 5 and shape[0] == "moments" and _is_batch(shape[1:]) for shape in frames)
    )


def _is_batch(shape: Sequence[Any]) -> bool:
    return shape[0] == "batch" and all(type(size) is int and size > 0 for size in shape[1:])


def _session(data: bytes, path: Path, threads: int, providers: tuple[Provider, ...]) -> Any:
    try:
        return new_session(data, threads, providers)
    except Exception as error:  # ONNX Runtime's own errors share no base class
        raise FileError(f"cannot load the ONNX file {path} ({in_one_line(error)}); export it again") from error


def prefers_second(first: Any, second: Any, encoder: Encoder | None, rate_hz: float) -> bool:
    """Whether the second of two sessions, of one thread and of all cores, is faster in a control loop; at batch 1, where all
    frames are encoded. Back to back more threads seem better than they are: between calls cores and threads fall asleep."""
    sizes = {"batch": 1, "kept": 0, "moments": 0 if encoder is None else encoder.n_obs_steps}
    shapes = {item.name: [sizes.get(size, size) for size in item.shape] for item in first.get_inputs()}
    feed = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}

    def seconds(session: Any) -> float:
        started = time.perf_counter()
        run_session(session, [], feed)
        return time.perf_counter() - started

    deadline = time.perf_counter() + TRIAL_SECONDS
    if seconds(first) > TRIAL_SECONDS:
        return True  # so large that more cores help, and that nobody waits for a trial
    seconds(second)
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for session, times in zip((first, second), taken, strict=True):
            time.sleep(min(0.5 / rate_hz, 0.05))  # each is called once in a period
            times.append(seconds(session))
        if time.perf_counter() > deadline:
            break
    return statistics.median(taken[1]) < statistics.median(taken[0])
