"""What the whole-loop engines are built from: a program, a schedule's plan and a sampler's table. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from blockcache.engines.walk import TOLD_OFFSET, TOLD_SCALE
from blockcache.errors import EngineError
from blockcache.models.own_policy import NOT_ACTIONS_ALONE
from blockcache.models.port import Port
from blockcache.models.program import Program, UnsupportedError
from blockcache.samplers import SamplerTable, table
from blockcache.schedule import Plan, Schedule, compile_plan
from blockcache_runtime.chunks import Previous


@dataclass(frozen=True, eq=False)
class Build:
    """A program under a schedule, with the sampler's table.

    Args:
        program: The denoiser.
        schedule: Which blocks are computed at which step.
        sampler: The coefficients of all steps.
        longer_history: Whether an observation of more moments than the program takes is read as the policy reads it.
        rehearsal_seconds: What comparing it with the policy's own actions took.
    """

    program: Program
    schedule: Schedule
    sampler: SamplerTable
    longer_history: bool = True
    rehearsal_seconds: float = 0.0

    @cached_property
    def plan(self) -> Plan:
        return compile_plan(self.schedule, sums=not self.program.gated)

    def actions_only(self) -> Build:
        """Without the tokens behind the executed slice; they cannot influence it."""
        if not self.program.causal:
            raise EngineError('output="action" needs causal attention, which this policy lacks; use output="chunk"')
        return replace(self, program=self.program.cut(self.program.executed[1]))

    def told(self, port: Port) -> Build:
        """The same for chunks that are told of the one before (real-time chunking); `port` is the policy's."""
        if self.program.chunk[1] != self.program.action_dim:
            raise EngineError(NOT_ACTIONS_ALONE)
        units = {TOLD_SCALE: port.action_scale, TOLD_OFFSET: port.action_offset}
        weights = {name: torch.as_tensor(value).to(self.program.like) for name, value in units.items()}
        signature = f"{self.program.signature} told"
        return replace(
            self, program=replace(self.program, weights={**self.program.weights, **weights}, signature=signature)
        )

    def told_inputs(self, previous: Previous, batch: int) -> dict[str, Tensor]:
        """What is known of the chunk before, as the program takes it."""
        program = self.program
        if TOLD_SCALE not in program.weights:
            raise EngineError("this engine takes no previous chunk; accelerate the policy with rtc=True")
        told = previous.inputs(batch, program.tokens - program.executed[0], program.action_dim)
        return {name: torch.from_numpy(value).to(program.like) for name, value in told.items()}


def build(port: Port, schedule: Schedule, engine: str) -> Build:
    """Fold a policy for an engine, or say why that engine cannot run it and which one can."""
    try:
        program = port.program()
    except UnsupportedError as error:
        raise EngineError(f'the {engine} engine does not support {error}; use engine="patched"') from error
    assert port.sampler is not None  # a program was made for it
    return Build(program, schedule, table(port.sampler))


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
