"""What the whole-loop engines are built from: a program, a schedule's plan and a sampler's table. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from blockcache.attach.patching import Patches
from blockcache.engines.walk import TOLD_OFFSET, TOLD_SCALE
from blockcache.errors import EngineError, FileError
from blockcache.files import Fields, Limit, PathLike, exists, read, read_json, reading
from blockcache.models.own_policy import NOT_ACTIONS_ALONE
from blockcache.models.policy_files import SAMPLER, SCHEDULE, TUNING
from blockcache.models.port import Port
from blockcache.models.program import Program, UnsupportedError
from blockcache.samplers import ChosenSampler, SamplerConfig, SamplerTable, table
from blockcache.schedule import Plan, Schedule, compile_plan
from blockcache_runtime.chunks import Previous
from blockcache_runtime.execution import Execution


@dataclass(frozen=True)
class Comparison:
    """What calls of a policy and of its program showed.

    Args:
        reason: How they differ, as a clause; None if they agree.
        longer_history: Whether they agree as well where the history is longer than `n_obs_steps`.
        more: What the policy returns besides actions and chunk, by name, which no engine gives.
        seconds: What comparing took.
    """

    reason: str | None
    longer_history: bool = False
    more: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Build:
    """A program under a schedule, with the sampler's table.

    Args:
        program: The denoiser.
        schedule: Which blocks are computed at which step.
        sampler: The coefficients of all steps.
        compared: What comparing it with the policy's own actions showed; what is taken for granted where that is left out.
    """

    program: Program
    schedule: Schedule
    sampler: SamplerTable
    compared: Comparison = Comparison(None, longer_history=True)

    @cached_property
    def plan(self) -> Plan:
        return compile_plan(self.schedule, sums=not self.program.gated)

    def shaped(self, port: Port, output: str, rtc: bool) -> Build:
        """The same for what was asked of an engine or a file.

        Args:
            port: The policy.
            output: "chunk", or "action" to leave out what the robot does not execute.
            rtc: Whether it is told of the chunk before (real-time chunking).
        """
        cut = self if output == "chunk" else self.actions_only()
        return cut._told(port) if rtc else cut

    def actions_only(self) -> Build:
        """Without the tokens behind the executed slice; they cannot influence it."""
        if not self.program.causal:
            raise EngineError('output="action" needs causal attention, which this policy lacks; use output="chunk"')
        return replace(self, program=self.program.cut(self.program.executed[1]))

    def _told(self, port: Port) -> Build:
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


def build(port: Port, schedule: Schedule, engine: str, fold: Callable[[], Program] | None = None) -> Build:
    """Fold a policy for an engine (with `fold` if given), or say why that engine cannot run it and which one can."""
    refuse_autocast(next(port.adapter.denoiser.parameters()))
    try:
        program = (fold or port.program)()
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


# -- what `tune` wrote into a directory

_TUNING = Fields({}, {"setting": Fields({}, {"replan": Annotated[int, Limit(1)] | None}, others=True)}, others=True)


def read_tuned(directory: PathLike, port: Port) -> tuple[SamplerConfig | None, Schedule | None, Execution]:
    """The sampler, None for the policy's own; the schedule, None for every block at every step; and how often it replans.

    Args:
        directory: That `tune` or `save_tuned` wrote.
        port: The policy, with its own sampler; a sampler that was chosen for other weights is refused.
    """
    place = Path(directory)
    if not exists(place / TUNING):
        raise FileError(f"{place} has no {TUNING}; name a directory that 'blockcache tune' wrote")
    sampler = None
    if exists(place / SAMPLER):
        chosen = ChosenSampler.load(place / SAMPLER)
        chosen.check_fit(port.fingerprint)
        sampler = chosen.sampler
    with reading("tuning", place / TUNING, "run 'blockcache tune' again"):
        found = read(_TUNING, read_json(place / TUNING, "tuning"))
    execution = Execution(found.get("setting", {}).get("replan"))
    if execution.replan is not None:
        execution.check(port.horizon - port.executed[0])
    return sampler, Schedule.load(place / SCHEDULE) if exists(place / SCHEDULE) else None, execution


def answer_for(policy: Any, port: Port, patches: Patches) -> None:
    """Plan that a port, of the same weights behind another sampler, answers in a policy's place."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return getattr(port.policy, port.entry)(*args, **kwargs)

    patches.replace_entry(policy, port.entry, lambda original: entry)


def tuned_port(directory: PathLike, port: Port) -> tuple[Port, Schedule | None, Port]:
    """The policy with the tuned sampler, executing as many actions as was tuned; the schedule to follow; and the policy with
    its own sampler, executing as many. All share the weights.

    Args:
        directory: A directory that `tune` or `save_tuned` wrote.
        port: The policy with its own sampler.
    """
    sampler, schedule, execution = read_tuned(directory, port)
    own = port if execution.replan is None else port.executing(execution.replan)
    return own if sampler is None else own.with_sampler(sampler), schedule, own
