"""The walk: one generation of any program under any plan and sampler, on any backend. Written once.

On the torch backend it runs (the loop engine), on the ONNX backend it writes a graph. Knows no family and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from blockcache.models.program import Ops, Program, Value
from blockcache.samplers import Arithmetic, Coefficients, Guide, SamplerTable, step
from blockcache.schedule.plan import Compute, Operation, Plan, Reuse
from blockcache_runtime.chunks import EXECUTION_HORIZON, LATENCY, PREVIOUS_CHUNK, TOLD
from blockcache_runtime.session import EARLIER_FEATURES

TOLD_SCALE, TOLD_OFFSET = "rtc_scale", "rtc_offset"
"""Weights of a program that can be told of the chunk before: what makes robot units normalised ones."""
Step: TypeAlias = Callable[["Backend", Any, Coefficients, Value, Value, Value], tuple[Value, Value]]
"""(backend, step, coefficients, sample, x0 of the step before, scaled noise) -> the next sample and x0."""


class Backend(Ops, Arithmetic[Value], Protocol):
    """Operations, the sampler's arithmetic, and what surrounds the steps."""

    def scaled_noise(self, noise: Value, scales: Sequence[float], tokens: int) -> list[Value]:
        """All the noise (1 + draws, B, T, D), each tensor times its scale, the first tokens of it: (rows, D) each."""

    def repeat(self, body: Step, sampler: SamplerTable, noise: Sequence[Value]) -> Value | None:
        """Steps that are all alike, as one loop of the backend's own: the clean sample. None if it has none."""

    def pull(self, delay: Value, overlap: Value, before: int, tokens: int) -> tuple[Value, Value]:
        """`chunks.prefix_weights` of (B,) and (B,) over all tokens, (rows, 1), 0 for those `before`; and 1 minus that."""

    def watch(self, stream: Value, output: Value) -> None:
        """Remember a step's stream before it leaves, (rows, d), and the denoiser's output, (rows, D)."""

    def norms(self, actions: Value) -> Value:
        """Of all that was remembered and of the actions (B, tokens, A), as one or of the largest row: who hands out the
        actions looks at this first."""


def generate(
    backend: Backend, program: Program, plan: Plan, sampler: SamplerTable, obs: Mapping[str, Value], noise: Value
) -> dict[str, Value]:
    """One generation.

    Args:
        backend: Executes operations, or writes them down.
        program: The denoiser.
        plan: Which blocks are computed at which step.
        sampler: The coefficients of all steps.
        obs: The observation in robot units, by the program's input names; of cameras the moments come before the batch.
            With the inputs that `chunks` names besides, if the chunk is told of the one before.
        noise: (1 + draws, B, T, D): the start, then one for each step that draws.

    Returns:
        `action`, and `action_pred` where the whole chunk is computed, in robot units; and `norms`, which shows what a clip
        or a norm hides from the actions. With cameras also `features`, (moments, B, features): of the moments before the
        frames in `obs`, where `obs` has `EARLIER_FEATURES` too, and of the frames.
    """
    scales = [float(scale) for scale, draws in zip(sampler.s, sampler.draws, strict=True) if draws]
    scaled = backend.scaled_noise(noise, [1.0, *scales], program.tokens)
    guide, obs = guided(backend, program, obs)
    shown, features = perceive(backend, program, obs)
    conditions = program.conditions(backend, shown)
    sample = denoise(backend, program, plan, sampler, conditions, scaled, guide)
    actions = program.select(backend, program.finish(backend, sample), conditions)
    norms = backend.norms(actions)
    found = {"action": backend.slice(actions, 1, *program.executed), **features, "norms": norms}
    return {**found, "action_pred": actions} if program.whole else found


def guided(
    backend: Backend, program: Program, obs: Mapping[str, Value]
) -> tuple[Guide[Value] | None, Mapping[str, Value]]:
    """What the chunk is told of the one before, token by token, if anything is; and the observation alone."""
    if PREVIOUS_CHUNK not in obs:
        return None, obs
    before, shape = program.executed[0], (-1, program.action_dim)
    pull, keep = backend.pull(obs[LATENCY], obs[EXECUTION_HORIZON], before, program.tokens)
    known = backend.concat([*[backend.slice(obs[PREVIOUS_CHUNK], 1, 0, 1)] * before, obs[PREVIOUS_CHUNK]], 1)
    normalised = backend.add([backend.mul(known, backend.weight(TOLD_SCALE)), backend.weight(TOLD_OFFSET)])
    alone = {name: value for name, value in obs.items() if name not in TOLD}
    return Guide(pull, keep, backend.mul(backend.reshape(normalised, shape), pull)), alone


def perceive(ops: Ops, program: Program, obs: Mapping[str, Value]) -> tuple[Mapping[str, Value], dict[str, Value]]:
    """What `conditions` is given, and the features of all moments, (moments, B, features), if there are cameras.

    Args:
        ops: Executes operations, or writes them down.
        program: The denoiser.
        obs: The observation by the program's input names; of cameras the moments come before the batch. It may hold
            `EARLIER_FEATURES`, of the moments before its frames.
    """
    if not program.cameras:
        return obs, {}
    frames = {name: ops.reshape(obs[name], (-1, *program.inputs[name][1:])) for name in program.cameras}
    rows = program.see(ops, frames)  # (moments * B, features)
    if (kept := obs.get(EARLIER_FEATURES)) is not None:
        rows = ops.concat([ops.reshape(kept, (-1, program.features)), rows], axis=0)
    moments = program.inputs[program.cameras[0]][0]
    features = ops.reshape(rows, (moments, -1, program.features))
    others = {name: value for name, value in obs.items() if name not in (*program.cameras, EARLIER_FEATURES)}
    return {**others, "features": ops.transpose(features, (1, 0, 2))}, {"features": features}


def denoise(
    backend: Backend,
    program: Program,
    plan: Plan,
    sampler: SamplerTable,
    conditions: Any,
    noise: Sequence[Value],
    guide: Guide[Value] | None = None,
) -> Value:
    """All steps of the sampler; the clean sample (rows, D). `noise` is scaled already."""

    def alike(inner: Backend, now: Any, at: Coefficients, x: Value, x0: Value, added: Value) -> tuple[Value, Value]:
        output = denoiser_output(inner, program, plan.program[0], Reuse(plan, inner.add), conditions, now, x)
        return step(inner, at, x, output, x0, added, guide)

    if plan.computes_everything and (sample := backend.repeat(alike, sampler, noise)) is not None:
        return sample
    reuse, drawn = Reuse(plan, backend.add), iter(noise)
    x, x0 = next(drawn), None
    for number, operations in enumerate(plan.program):
        output = denoiser_output(backend, program, operations, reuse, conditions, number, x)
        reuse.end_step(number)
        at, draws = sampler.at(number), sampler.draws[number]
        x, x0 = step(backend, replace(at, s=float(draws)), x, output, x0, next(drawn) if draws else None, guide)
    return x


def denoiser_output(
    ops: Backend,
    program: Program,
    operations: Sequence[Operation],
    reuse: Reuse[Value],
    conditions: Any,
    now: Any,
    x: Value,
) -> Value:
    """One step of the denoiser under a plan's operations: the sample (rows, D) -> its output (rows, D).

    Args:
        ops: Executes operations, or writes them down.
        program: The denoiser.
        operations: Which blocks this step computes and which it reuses, in order.
        reuse: The residuals that earlier steps left behind.
        conditions: What `program.conditions` made of the observation.
        now: The number of the step, or None inside a loop of the backend's own.
        x: The sample (rows, D).
    """
    conditions = program.begin(ops, conditions, now)
    stream: Value = None
    waiting: list[Value] = []  # to be added before the stream is used again

    def added_up() -> Value:
        base = program.enter(ops, x, conditions.start, conditions, now) if stream is None else stream
        return ops.add([base, *waiting])

    def gated(block: int, residual: Value) -> Value:
        gate = program.gate(ops, block, conditions, now) if program.gated else None
        return residual if gate is None else ops.mul(residual, gate)

    for operation in operations:
        if isinstance(operation, Compute):
            stream = added_up()
            residual = program.residual(ops, operation.block, stream, conditions, now)
            reuse.computed(operation, residual)
            waiting = [gated(operation.block, residual)]
        elif program.gated:
            waiting.append(gated(operation.run[0], reuse.run(operation)))
        elif stream is None:  # the first blocks: the stream starts on top of them
            stream = program.enter(ops, x, reuse.run_onto(operation, conditions.start), conditions, now)
        else:
            waiting.append(reuse.run(operation))
    stream = added_up()
    output = program.leave(ops, stream, conditions, now)
    ops.watch(stream, output)
    return output
