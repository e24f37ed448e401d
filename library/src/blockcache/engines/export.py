"""A policy under a schedule as one ONNX file: written, and opened again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockcache.engines.accelerate import CHECKS, OUTPUTS, check_choice, check_fit, full_schedule
from blockcache.engines.build import tuned_port
from blockcache.engines.guarded import fit_guard
from blockcache.engines.onnx import OnnxRunner, export, require_size
from blockcache.engines.rehearsal import build_for_file
from blockcache.errors import ScheduleError
from blockcache.files import PathLike
from blockcache.models.registry import port_of
from blockcache.schedule import Schedule
from blockcache_runtime.guard import FULL
from blockcache_runtime.session import RATE_HZ


def export_policy(
    policy: Any,
    schedule: Schedule | None,
    path: PathLike,
    output: str = "chunk",
    check: str = "strict",
    trust: bool = False,
    rtc: bool = False,
    fixed: Mapping[str, Any] | None = None,
    tuned: PathLike | None = None,
    guard: str | None = None,
    observations: Any = None,
) -> tuple[str, ...]:
    """Write a policy under a schedule as one ONNX file, atomically.

    Args:
        policy: The policy object of any family, or its port.
        schedule: A Schedule, or None for full precision.
        path: The file to write.
        output: "chunk", or "action" to leave out what the robot does not execute (causal policies).
        check: "strict", or "shape" to accept a schedule that was made for other weights of the same shape.
        trust: Whether to leave out the comparison with a foreign policy's own actions, see `accelerate`.
        rtc: Whether the file takes what is known of the chunk before (real-time chunking), as three more inputs.
        fixed: Inputs that never change, by name, such as the token ids of the one task of a policy that is told its task:
            they become constants of the file.
        tuned: A directory that `tune` wrote for this policy: its sampler, its schedule and how many actions are executed;
            `schedule` is None then.
        guard: What the file does about an observation unlike `observations`: "count", "warn" to log a line as well, or
            "full" to answer it in full precision as well: with the policy's own sampler and every block, over the same
            weights.
        observations: What the policy sees in its task, a batch of 32 or more, for the guard.

    Returns:
        Notes that a user should read.
    """
    check_choice("output", output, OUTPUTS)
    check_choice("check", check, CHECKS)
    if not isinstance(schedule, Schedule | None):
        raise ScheduleError(
            f"an export needs a Schedule or None, got {type(schedule).__name__}; a file is read with Schedule.load(path)"
        )
    if tuned is not None and schedule is not None:
        raise ScheduleError("a tuned directory brings its own schedule; give either tuned or a schedule")
    own = port = port_of(policy)
    port.check_weights()
    if tuned is not None:
        port, schedule, own = tuned_port(tuned, port)
    notes = () if schedule is None else check_fit(schedule.fingerprint, port, check)
    built = build_for_file(port, schedule or full_schedule(port), trust, fixed or {}).shaped(port, output, rtc)
    require_size(built.program)
    known = None if guard is None else fit_guard(port, guard, observations, built.program.inputs)
    full = None
    if guard == FULL:
        if port is own and schedule is None:
            raise ScheduleError(
                "a guard falls back to full precision, which this file is already; give a schedule or tuned"
            )
        full = build_for_file(own, full_schedule(own), True, fixed or {}).shaped(own, output, rtc)
    export(built, port.fingerprint, path, guard=known, full=full)
    outside = tuple(f"the file takes {name!r}: {what}" for name, what in built.program.outside.items())
    return (*notes, *outside)


def open_export(path: PathLike, policy: Any = None, threads: int | None = None, rate_hz: float = RATE_HZ) -> OnnxRunner:
    """Open an ONNX file that blockcache wrote, to run it on torch tensors (`blockcache_runtime` needs no torch).

    Args:
        path: The file.
        policy: If given, a file that was made for another policy is refused.
        threads: Threads to run it with; without it the faster of one thread and all cores is found out.
        rate_hz: How many calls a second, see `accelerate`.

    Returns:
        A runner; its `predict_action(obs)` gives what the policy's would.
    """
    runner = OnnxRunner(path, threads, rate_hz=rate_hz)
    if policy is not None:
        port = port_of(policy)
        runner.check_policy(port.fingerprint, port.executed)
    return runner
