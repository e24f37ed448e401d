"""Sessions of ONNX Runtime, and execution providers by the names that it has for them: which are there, which runs what."""

from __future__ import annotations

import atexit
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from blockcache_runtime.errors import EngineError, in_one_line

CPU = "CPUExecutionProvider"
ASSIGNED = "session.record_ep_graph_assignment_info"
"""The setting of a session with which it can say which provider runs which node."""
Provider = str | tuple[str, Mapping[str, Any]]
"""A name, or a name with the provider's own settings."""


def check_providers(asked: Sequence[Provider]) -> None:
    """Refuse an execution provider that the installed ONNX Runtime does not have.

    Args:
        asked: The providers, in order of preference.
    """
    import onnxruntime

    there = onnxruntime.get_available_providers()
    if not names(asked):
        raise EngineError(f"providers is a list of one name at least, such as {CPU}, got none")
    if unknown := [name for name in names(asked) if name not in there]:
        raise EngineError(
            f"the installed onnxruntime {onnxruntime.__version__} has no provider {unknown[0]!r}, it has "
            f"{', '.join(there)}; install the build of it that brings that provider (onnxruntime-gpu, onnxruntime-openvino)"
        )


def names(asked: Sequence[Provider]) -> list[str]:
    """Their names alone."""
    return [item if isinstance(item, str) else item[0] for item in asked]


def nodes_of(session: Any, asked: Sequence[Provider]) -> dict[str, int]:
    """How many nodes each provider runs; refuses a session in which none of those that were asked for runs any.

    ONNX Runtime goes on with the CPU where a provider cannot start, or takes no node.

    Args:
        session: It was made with the setting `ASSIGNED`.
        asked: The providers that were asked for.
    """
    wanted = names(asked)
    if stopped := [name for name in wanted if name not in session.get_providers()]:
        raise EngineError(
            f"{stopped[0]} cannot start on this machine, and ONNX Runtime would run everything on the CPU; see its own "
            "messages above, or leave providers out"
        )
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise EngineError(
            "the installed onnxruntime cannot say which provider runs what; install a newer one, or leave providers out"
        )
    found = Counter[str]()
    for part in session.get_provider_graph_assignment_info():
        found[part.ep_name] += len(part.get_nodes())
    if not any(found[name] for name in wanted):
        raise EngineError(
            f"{wanted[0]} runs none of the {found.total()} nodes of this export; ask for a provider that does, or leave "
            "providers out"
        )
    return {name: found[name] for name in dict.fromkeys([*wanted, *found])}


def require_onnxruntime(minimum: tuple[int, ...]) -> str:
    """The version that is installed, if it is new enough.

    Args:
        minimum: The oldest version that will do, such as (1, 23).
    """
    hint = (
        f"version {'.'.join(map(str, minimum))} or newer comes with blockcache-runtime, which docs/start.md says how to "
        "install from a clone or a wheel"
    )
    try:
        import onnxruntime

        found = str(onnxruntime.__version__)
    except (ImportError, AttributeError) as error:  # AttributeError: an empty directory of that name
        raise EngineError(f"an export needs onnxruntime, which is not installed; {hint}") from error
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < minimum:
        raise EngineError(f"an export needs a newer onnxruntime than the installed {found}; {hint}")
    return found


def new_session(data: bytes, threads: int, providers: Sequence[Provider] = ()) -> Any:
    """A session of ONNX Runtime for a serialised model, with the settings that every engine uses.

    Args:
        data: The model.
        threads: Of the CPU.
        providers: What runs it, in order of preference; none for the CPU. Only with some can it say what runs where.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # nothing is left to fuse in an export: without trying it loads twice as fast and runs a little faster, in the order in
    # which it is written. Nor is any part of it run for folding it
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # planning the reuse of thousands of small buffers takes many seconds and saves nothing: the arena does it anyway
    options.enable_mem_reuse = False
    # between calls the worker threads sleep instead of burning a core that the robot needs
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.load_model_format", "ONNX")  # or the first bytes would decide
    options.log_severity_level = 3
    if providers:
        options.add_session_config_entry(ASSIGNED, "1")
    # without enable_fallback=0 it prints, and tries again without the options
    session = ort.InferenceSession(data, options, providers=[*providers] or [CPU], enable_fallback=0)
    session._model_bytes = None  # it would keep the file's bytes for as long as it lives
    return session


_running: dict[object, int] = {}  # calls that are in ONNX Runtime, and the thread of each
_ending = threading.Event()


def run_session(session: Any, outputs: list[str], feed: Mapping[str, Any]) -> list[Any]:
    """One run of a session on what was checked already; if it fails, in one sentence.

    Args:
        session: A session of ONNX Runtime.
        outputs: Names of the outputs to compute; an empty list for all of them.
        feed: Arrays by the names of the session's inputs.
    """
    this = object()
    _running[this] = threading.get_ident()
    if _ending.is_set() and threading.current_thread() is not threading.main_thread():
        del _running[this]
        threading.Event().wait()  # a daemon thread: the process is about to end
    try:
        return session.run(outputs, feed)
    except Exception as error:  # ONNX Runtime's own errors share no base class
        hint = "take a smaller batch, or export it again"
        raise EngineError(f"ONNX Runtime cannot run this ({in_one_line(error)}); {hint}") from error
    finally:
        _running.pop(this, None)


@atexit.register
def _let_runs_end() -> None:
    """Python ends a daemon thread where it asks for the interpreter again; out of ONNX Runtime that aborts the process."""
    _ending.set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        living = {thread.ident for thread in threading.enumerate()}  # after a fork, others are gone
        if not living.intersection(_running.values()):
            return
        time.sleep(0.001)
