"""What the whole-loop engines are built from: a program, a schedule's plan and a sampler's table. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from blockcache.engines.rehearsal import rehearse
from blockcache.errors import BlockcacheError, EngineError, in_one_line
from blockcache.models.port import Port
from blockcache.models.program import Program, UnsupportedError
from blockcache.samplers import SamplerTable, table
from blockcache.schedule import Plan, Schedule, compile_plan


@dataclass(frozen=True, eq=False)
class Build:
    """A program under a schedule, with the sampler's table."""

    program: Program
    schedule: Schedule
    sampler: SamplerTable

    @cached_property
    def plan(self) -> Plan:
        return compile_plan(self.schedule, sums=not self.program.gated)

    def actions_only(self) -> Build:
        """Without the tokens behind the executed slice; they cannot influence it."""
        if not self.program.causal:
            raise EngineError('output="action" needs causal attention, which this policy lacks; use output="chunk"')
        return replace(self, program=self.program.cut(self.program.executed[1]))


def build(port: Port, schedule: Schedule, engine: str) -> Build:
    """Fold a policy for an engine, or say why that engine cannot run it and which one can."""
    try:
        program = port.program()
    except UnsupportedError as error:
        raise EngineError(f'the {engine} engine does not support {error}; use engine="patched"') from error
    assert port.sampler is not None  # a program was made for it
    return Build(program, schedule, table(port.sampler))


def rehearsed_build(port: Port, schedule: Schedule, engine: str, output: str = "chunk") -> Build:
    """The same for an engine that is about to take the policy's place: a foreign policy is compared with its program first.

    Args:
        port: The policy.
        schedule: What the engine follows.
        engine: Its name, for the sentences that refuse a policy.
        output: "chunk", or "action" to leave out what the robot does not execute.
    """
    refuse_autocast(next(port.adapter.denoiser.parameters()))
    try:
        whole = build(port, schedule, engine)
        if (
            not port.trusted and not port.begins_after_encoder
        ):  # behind an encoder, the first observation is needed to compare
            rehearse(port, whole.program, engine)
    except BlockcacheError:
        raise
    except Exception as error:
        if port.trusted:
            raise
        reason = in_one_line(error)  # a foreign policy may differ in more ways than can be listed
        raise EngineError(f'the {engine} engine cannot run this policy ({reason}); use engine="patched"') from error
    return whole if output == "chunk" else whole.actions_only()


def refuse_autocast(like: Tensor) -> None:
    """A whole-loop engine computes in the policy's own precision; under autocast the policy itself would not."""
    kind = like.device.type
    try:
        on = torch.is_autocast_enabled(kind)
    except TypeError:  # before torch 2.4
        on = torch.is_autocast_cpu_enabled() if kind == "cpu" else torch.is_autocast_enabled()
    if on:
        raise EngineError(
            "torch.autocast is on, and the loop and onnx engines compute in the policy's own precision all the same; leave "
            'autocast, or use engine="patched", which obeys it'
        )
