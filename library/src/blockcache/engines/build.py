"""What the whole-loop engines are built from: a program, a schedule's plan and a sampler's table. Values only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from blockcache.errors import EngineError
from blockcache.models.port import Port
from blockcache.models.program import Program, UnsupportedError
from blockcache.samplers import SamplerTable, table
from blockcache.schedule import Plan, Schedule, compile_plan


@dataclass(frozen=True, eq=False)
class Build:
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
