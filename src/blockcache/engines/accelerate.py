"""`accelerate`: check that a schedule fits, choose an engine, attach it, and hand back the way to undo it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from blockcache.attach.patching import Patches, is_ours
from blockcache.deploy.session import require_onnxruntime
from blockcache.engines import patched
from blockcache.engines.compiled import CompiledPolicy, compile_policy, executed_tokens
from blockcache.engines.loop import Loop
from blockcache.engines.onnx import export, open_cached
from blockcache.engines.onnx_runner import OnnxRunner
from blockcache.engines.rehearsal import rehearse
from blockcache.engines.stats import Counts, Stats
from blockcache.engines.whole_loop import Runner, attach_runner, cut_for
from blockcache.errors import BlockcacheError, EngineError, FileError, PolicyError, ScheduleError
from blockcache.files import PathLike
from blockcache.fingerprint import Fingerprint
from blockcache.models.port import Target, examine
from blockcache.schedule import Schedule
from blockcache.schedule.plan import compile_plan
from blockcache.solvers.teacache import Rule

ENGINES = ("auto", "onnx", "loop", "patched")
OUTPUTS = ("chunk", "action")
CHECKS = ("strict", "shape")
_enabling = threading.Lock()


class Acceleration:
    """An accelerated policy: use it as the policy, or the policy itself, until `disable()` or the end of the `with`."""

    def __init__(
        self,
        policy: Any,
        engine: str,
        blocks: tuple[str, ...],
        patches: Patches,
        counts: Counts,
        notes: tuple[str, ...],
    ) -> None:
        self.policy = policy
        self.engine = engine
        self._blocks = blocks
        self._patches: Patches | None = patches
        self._counts = counts
        self._notes = notes
        self.predict_action = self._with_signature_of(policy.predict_action)

    @property
    def enabled(self) -> bool:
        return self._patches is not None

    def _with_signature_of(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The policy's own `predict_action`, accelerated. Who looks for `generator` in it must find what the policy has."""

        @functools.wraps(own, updated=())
        def predict_action(*args: Any, **kwargs: Any) -> Any:
            if not self.enabled:
                raise PolicyError("this acceleration was disabled; call the policy itself, or accelerate it again")
            return self.policy.predict_action(*args, **kwargs)

        return predict_action

    def stats(self) -> Stats:
        """What was computed and what was reused since enabling."""
        return self._counts.stats(self.engine, self._blocks, self._notes)

    def disable(self) -> None:
        """Put the policy back exactly as it was. Calling it again does nothing."""
        with _enabling:
            if self._patches is not None:
                self._patches.remove()
                self._patches = None

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()


def accelerate(
    policy: Any,
    schedule: Schedule | Rule | None = None,
    engine: str = "auto",
    output: str = "chunk",
    check: str = "strict",
    threads: int | None = None,
) -> Acceleration:
    """Make the policy's `predict_action` follow a schedule (or a TeaCache rule), in place, until it is disabled.

    Without a schedule the policy runs at full precision, with the exact savings of the engine only. `output="action"`
    leaves out what the robot does not execute (loop and onnx). `check="shape"` accepts a schedule made for other weights
    of the same shape, and `stats()` says so. `threads` is for the onnx engine; without it the faster of one thread and
    all cores is found out when the engine starts.
    """
    _check_choice("engine", engine, ENGINES)
    _check_choice("output", output, OUTPUTS)
    _check_choice("check", check, CHECKS)
    if not isinstance(schedule, Schedule | Rule | None):
        raise ScheduleError(
            f"accelerate needs a Schedule, a TeaCache Rule or None, got {type(schedule).__name__}; "
            "a file is read with Schedule.load(path)"
        )
    if threads is not None and threads < 1:
        raise EngineError(f"an engine needs one thread at least, got {threads}")
    with _enabling:
        if is_ours(policy, "predict_action"):
            raise PolicyError("this policy is accelerated already; call disable() first")
        target = examine(policy)
        blocks = tuple(block.name for block in target.adapter.blocks)
        notes = () if schedule is None else check_fit(schedule.fingerprint, target, check)
        counts = Counts()
        followed = Schedule.every_step(len(target.timesteps), blocks) if schedule is None else schedule
        if engine == "auto" and isinstance(followed, Schedule):
            chosen, patches, passed_over = _attach_fastest(target, followed, output, threads, counts)
        else:
            chosen, patches, passed_over = *_attach(target, followed, engine, output, threads, counts), ()
    return Acceleration(policy, chosen, blocks, patches, counts, (*notes, *passed_over))


def _attach(
    target: Target, followed: Schedule | Rule, engine: str, output: str, threads: int | None, counts: Counts
) -> tuple[str, Patches]:
    """Attach the engine that was asked for."""
    if isinstance(followed, Rule):
        if engine not in ("auto", "patched") or output != "chunk":
            raise EngineError('TeaCache decides while it runs: it needs engine="patched" and output="chunk"')
        return "patched", patched.attach_rule(target, followed, counts)
    if engine == "patched":
        if output != "chunk":
            raise EngineError(
                'the patched engine computes the whole chunk; output="action" needs engine="loop" or "onnx"'
            )
        return engine, patched.attach_schedule(target, followed, counts)
    if engine == "onnx":
        require_onnxruntime()
        _require_cpu_float32(target)
    compiled = _compile(target, engine, output)
    runner: Runner
    if engine == "loop":
        runner = Loop(compiled, compile_plan(followed))
    else:
        runner = open_cached(compiled, followed, target.fingerprint, threads)
    return engine, attach_runner(target, compiled, runner, followed, counts)


def _attach_fastest(
    target: Target, schedule: Schedule, output: str, threads: int | None, counts: Counts
) -> tuple[str, Patches, tuple[str, ...]]:
    """Attach the fastest engine that supports the policy, and say why it is not a faster one."""
    passed_over: list[str] = []
    for engine in ("onnx", "loop"):
        try:
            return *_attach(target, schedule, engine, output, threads, counts), tuple(passed_over)
        except (EngineError, FileError) as error:  # FileError: no room for the export
            if engine == "loop" and output != "chunk":
                raise  # patched computes the whole chunk in any case, so this is the reason to give
            passed_over.append(f"not {engine}: {error}")
    return *_attach(target, schedule, "patched", output, threads, counts), tuple(passed_over)


def _compile(target: Target, engine: str, output: str) -> CompiledPolicy:
    try:
        whole = compile_policy(target, engine)
        if not target.ours:
            rehearse(target, whole, engine)
    except BlockcacheError:
        raise
    except Exception as error:
        if target.ours:
            raise
        reason = f"{type(error).__name__}: {error}"  # a foreign policy may differ in more ways than we can list
        raise EngineError(f'the {engine} engine cannot run this policy ({reason}); use engine="patched"') from error
    return cut_for(whole, output)


def _require_cpu_float32(target: Target) -> None:
    like = next(target.adapter.denoiser.parameters())
    if like.device.type != "cpu" or like.dtype != torch.float32:
        raise EngineError(
            f'the onnx engine runs float32 on the CPU, got {like.dtype} on {like.device}; use engine="loop"'
        )


def export_policy(
    policy: Any, schedule: Schedule | None, path: PathLike, output: str = "chunk", check: str = "strict"
) -> None:
    """Write the policy under a schedule (full precision without one) as one ONNX file, atomically."""
    _check_choice("output", output, OUTPUTS)
    _check_choice("check", check, CHECKS)
    if not isinstance(schedule, Schedule | None):
        raise ScheduleError(
            f"an export needs a Schedule or None, got {type(schedule).__name__}; a file is read with Schedule.load(path)"
        )
    target = examine(policy)
    blocks = tuple(block.name for block in target.adapter.blocks)
    if schedule is not None:
        check_fit(schedule.fingerprint, target, check)
    compiled = _compile(target, "onnx", output)
    export(compiled, schedule or Schedule.every_step(len(target.timesteps), blocks), target.fingerprint, path)


def open_export(path: PathLike, policy: Any = None, threads: int | None = None) -> OnnxRunner:
    """Open an ONNX file that blockcache wrote; one that was made for another than the given policy is refused."""
    runner = OnnxRunner(path, threads)
    if policy is not None:
        runner.check(examine(policy).fingerprint, executed_tokens(policy))
    return runner


def check_fit(bound: Fingerprint, target: Target, check: str = "strict") -> tuple[str, ...]:
    """Refuse a schedule that was made for something else; return notes on what was let pass."""
    ignored = ("weights",) if check == "shape" else ()
    differences = bound.differences(target.fingerprint, ignored)
    if differences:
        only_weights = not bound.differences(target.fingerprint, ("weights",))
        hint = ' (or pass check="shape" to use it all the same)' if only_weights else ""
        raise ScheduleError(
            f"this schedule does not fit the policy, which has {'; '.join(differences)}; calibrate again with "
            f"'blockcache calibrate' and 'blockcache solve'{hint}"
        )
    if bound.weights != target.fingerprint.weights:
        given = "for no weights in particular" if bound.weights is None else "for other weights"
        return (f"the schedule was made {given}",)
    return ()


def _check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise EngineError(f"unknown {what} {value!r}, known are {', '.join(known)}")
