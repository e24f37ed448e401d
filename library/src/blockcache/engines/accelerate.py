"""`accelerate`: check that a schedule fits, choose an engine, attach it, and hand back the way to undo it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import torch

from blockcache.attach.patching import handle_on, locks
from blockcache.engines.build import answer_for, tuned_port
from blockcache.engines.guarded import fit_guard, watch_entry
from blockcache.engines.handle import Acceleration, Counts, PreparedEngine
from blockcache.engines.loop import Loop
from blockcache.engines.onnx import open_cached, require_onnxruntime, require_size
from blockcache.engines.patched import follow
from blockcache.engines.rehearsal import RehearsalError, Runner, rehearsed_build
from blockcache.engines.whole_loop import prepare_runner
from blockcache.errors import EngineError, FileError, PolicyError, ScheduleError
from blockcache.files import PathLike
from blockcache.fingerprint import Fingerprint, fingerprint_differences
from blockcache.models.policy_files import SCHEDULE, place_of
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.schedule import Schedule, Strategy
from blockcache_runtime.session import RATE_HZ

BESIDE: Final = "beside"  # no schedule was named: the one beside the policy, if any
ENGINES = ("auto", "onnx", "loop", "patched")
OUTPUTS = ("chunk", "action")
CHECKS = ("strict", "shape")
_logger = logging.getLogger("blockcache")
_told: set[str] = set()


def accelerate(
    policy: Any,
    schedule: Strategy | Literal["beside"] | None = BESIDE,
    engine: str = "auto",
    output: str = "chunk",
    check: str = "strict",
    threads: int | None = None,
    trust: bool = False,
    rtc: bool = False,
    rate_hz: float = RATE_HZ,
    tuned: PathLike | None = None,
    guard: str | None = None,
    observations: Any = None,
) -> Acceleration:
    """Make a policy follow a schedule, in place, until the acceleration is disabled.

    Patched runs the policy as it is. Loop and onnx run a copy, and say so with a `StaleError` if the policy changed:

    - at the next call: every edit of weights that torch counts; tensors and modules that are replaced, moved or removed; on
      the CPU, all of a matrix changed in any other way; the policy's own plain settings, its sampler and sizes
    - within 16 calls: hooks, functions (a replaced `forward`) and plain settings (`eps`) of every module in the policy
    - within 128 calls, `noticed_within`: any other byte of the weights, such as a single one written through `.data`
    - by `verify()` only: what is changed within a list, mapping or array that a module holds; the class of a module; code
      that is replaced elsewhere (in a class, in a library, in a hook of all modules); what else makes its actions differ
    - not at all: what shows only with observations that are unlike those of `verify()`, which makes up its own

    Args:
        policy: The policy object of any family, or its port.
        schedule: A Schedule, a TeaCacheRule, or None: full precision, with the exact savings of the engine only. Without it
            the policy follows the `schedule.json` in the directory that it was loaded from, if any, and `stats()` says so.
        engine: "onnx", "loop", "patched", or "auto": the fastest of these that supports the policy.
        output: "chunk", or "action" to leave out what the robot does not execute (loop and onnx, causal policies).
        check: "strict", or "shape" to accept a schedule that was made for other weights; `stats()` says so.
        threads: Threads of the onnx engine. Without it one thread and all cores are tried when it first starts, for up to
            two seconds and at `rate_hz`, and which is faster is kept on disk.
        trust: Whether to leave out that loop and onnx compare a policy of other code than this package's with its own
            `predict_action`, at every start, in three generations; `rehearsal_seconds` says how long that took. For whoever
            knows that the policy, and all code that it runs, are those of an earlier start.
        rtc: Whether `predict_action` takes `previous`, what is known of the chunk before (real-time chunking); see
            `blockcache_runtime.chunks.Previous`.
        rate_hz: How many chunks a second a control loop is going to ask for. More threads may win back to back and lose at
            such a rate, since between calls cores and threads fall asleep.
        tuned: A directory that `tune` wrote for this policy, in place of a schedule: its sampler, its schedule
            and how many actions of a chunk are executed.
        guard: What to do about an observation unlike `observations`: "count", "warn" to log a line as well, or "full" to
            have the policy's own code answer it as well; the handle's `watch` counts.
        observations: What the policy sees in its task, a batch of 32 or more, for the guard.

    Returns:
        The handle: call it as the policy, ask it for `stats()`, and `disable()` it; it is a context manager as well.

    Raises:
        ScheduleError: The schedule was made for another policy.
        PolicyError: The policy is accelerated already, or none that is known.
        EngineError: The engine that was asked for cannot run this policy.
    """
    check_choice("engine", engine, ENGINES)
    check_choice("output", output, OUTPUTS)
    check_choice("check", check, CHECKS)
    followed: Path | None = None
    if isinstance(schedule, str) and schedule == BESIDE:
        followed = schedule_beside(policy) if tuned is None else None
        schedule = None if followed is None else Schedule.load_beside(followed)
    elif tuned is not None:
        raise ScheduleError("a tuned directory brings its own schedule; give either tuned or a schedule")
    if schedule is not None and not hasattr(schedule, "static"):
        raise ScheduleError(
            f"accelerate needs a Schedule, a TeaCacheRule or None, got {type(schedule).__name__}; "
            "a file is read with Schedule.load(path)"
        )
    if threads is not None and threads < 1:
        raise EngineError(f"an engine needs one thread at least, got {threads}")
    prepared: PreparedEngine | None = None
    try:
        with locks["enabling"]:
            inner = policy.policy if isinstance(policy, Port) else policy
            if handle_on(inner) is not None:
                raise PolicyError(
                    "this policy is accelerated already; call disable() first (blockcache.handle_of(policy) gives back a "
                    "handle that was lost)"
                )
            own = port = port_of(policy)
            port.check_weights()
            if tuned is not None:
                port, schedule, own = tuned_port(tuned, port)
            notes = () if schedule is None else check_fit(schedule.fingerprint, port, check)
            notes += () if followed is None else (f"the schedule is {followed}",)
            strategy, counts, passed_over = schedule or full_schedule(port), Counts(), tuple[str, ...]()
            prepare = functools.partial(_prepare, port, strategy, output, threads, rate_hz, trust, rtc, counts)
            if engine == "auto":
                engine, prepared, passed_over = _prepare_fastest(prepare, strategy, output)
            else:
                prepared = prepare(engine)
            if port.policy is not inner:
                answer_for(inner, port, prepared.patches)
            watch = None
            if guard is not None:
                watch = watch_entry(inner, port, own, fit_guard(port, guard, observations), prepared.patches, rtc)
            handle = Acceleration(inner, port, engine, prepared, counts, (*notes, *passed_over), watch)
            prepared.patches.apply()
            prepared.settle()
        for note in passed_over:
            if note not in _told:
                _told.add(note)
                _logger.warning("%s", note)
        return handle
    except BaseException:  # Ctrl-C too: nobody would have the handle
        if prepared is not None:
            prepared.patches.remove()
        raise


def schedule_beside(policy: Any) -> Path | None:
    """The schedule file in the directory that a policy (or its port) was loaded from, if there is one."""
    place = place_of(policy.policy if isinstance(policy, Port) else policy)
    return None if place is None or not (place / SCHEDULE).is_file() else place / SCHEDULE


def handle_of(policy: Any) -> Acceleration:
    """The handle of a policy that is accelerated now, should it have been lost.

    Args:
        policy: The policy object (or its port), not the handle.

    Raises:
        PolicyError: The policy is not accelerated.
    """
    found = handle_on(policy.policy if isinstance(policy, Port) else policy)
    if not isinstance(found, Acceleration):
        raise PolicyError(f"this {type(policy).__name__} is not accelerated: there is no handle to give back")
    return found


def full_schedule(port: Port) -> Schedule:
    return Schedule.every_step(len(port.timesteps), [block.name for block in port.adapter.blocks])


def _prepare_fastest(
    prepare: Callable[[str], PreparedEngine], strategy: Strategy, output: str
) -> tuple[str, PreparedEngine, tuple[str, ...]]:
    """The fastest engine that supports the policy, and why it is not a faster one."""
    passed_over: list[str] = []
    differs: RehearsalError | None = None
    for engine in ("onnx", "loop") if strategy.static else ():
        try:
            if differs is not None:
                raise differs.of(engine)  # it would run the same program
            return engine, prepare(engine), tuple(passed_over)
        except (EngineError, FileError) as error:  # FileError: an export that cannot be opened
            if engine == "loop" and output != "chunk":
                raise  # patched computes the whole chunk in any case, so this is the reason to give
            differs = error if isinstance(error, RehearsalError) else None
            passed_over.append(f"not {engine}: {error}")
    return "patched", prepare("patched"), tuple(passed_over)


def _prepare(
    port: Port,
    strategy: Strategy,
    output: str,
    threads: int | None,
    rate_hz: float,
    trust: bool,
    rtc: bool,
    counts: Counts,
    engine: str,
) -> PreparedEngine:
    if not strategy.static and (engine != "patched" or output != "chunk"):
        raise EngineError('TeaCache decides while it runs: it needs engine="patched" and output="chunk"')
    if engine == "patched":
        if output != "chunk":
            raise EngineError(
                'the patched engine computes the whole chunk; output="action" needs engine="loop" or "onnx"'
            )
        if rtc and "previous" not in inspect.signature(getattr(port.policy, port.entry)).parameters:
            raise EngineError(
                f"{type(port.policy).__name__}.{port.entry} takes no previous chunk, and the patched engine runs it as it "
                'is; real-time chunking needs engine="loop" or "onnx"'
            )
        return PreparedEngine(follow(port, strategy, counts))
    if engine == "onnx":
        require_onnxruntime()
        _require_cpu_float32(port)
    assert isinstance(strategy, Schedule)
    built = rehearsed_build(port, strategy, engine, trust)
    if more := built.compared.more:
        raise RehearsalError(port, engine, f"which returns {', '.join(more)} besides, and the engine does not")
    built = built.shaped(port, output, rtc)
    runner: Runner
    if engine == "loop":
        runner = Loop(built.program, built.plan, built.sampler)
    else:
        require_size(built.program)
        runner = open_cached(built, port.fingerprint, threads, rate_hz)
    return prepare_runner(port, built, runner, counts)


def _require_cpu_float32(port: Port) -> None:
    like = next(port.adapter.denoiser.parameters())
    if like.device.type != "cpu" or like.dtype != torch.float32:
        raise EngineError(
            f'the onnx engine runs float32 on the CPU, got {like.dtype} on {like.device}; use engine="loop"'
        )


def check_fit(bound: Fingerprint, port: Port, check: str = "strict") -> tuple[str, ...]:
    """Refuse a schedule that was made for something else than a policy; return notes on what was let pass.

    Args:
        bound: What the schedule was made for.
        port: The policy that is to follow it.
        check: "strict", or "shape" to accept other weights.
    """
    differences = fingerprint_differences(bound, port.shape)
    other_weights = bound.weights is not None and bound.weights != port.weights
    if differences or (other_weights and check == "strict"):
        listed = fingerprint_differences(bound, port.fingerprint) if other_weights else differences
        hint = "" if differences else ' (or pass check="shape" to use it all the same)'
        raise ScheduleError(
            f"this schedule does not fit the policy, which has {'; '.join(listed)}; calibrate again with "
            f"'blockcache calibrate' and 'blockcache solve'{hint}"
        )
    if bound.weights is None or other_weights:
        given = "for no weights in particular" if bound.weights is None else "for other weights"
        return (f"the schedule was made {given}",)
    return ()


def check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise EngineError(f"unknown {what} {value!r}, known are {', '.join(known)}")
