"""Compares a policy's own actions with those of its program at full precision, with the same noise.

A foreign policy is known by its shape alone, so the two are compared before a whole-loop engine takes its place, and again
by `verify()`. A `predict_action` that does more than the public code's, such as turning differences into
positions, is found out here and not on the robot. What was found to agree is remembered on disk, by weights, sampler, and
the policy's own code and settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockcache.cache import Cache, digest, source_hash
from blockcache.engines.description import IndescribableError, describe_policy
from blockcache.engines.loop import Loop
from blockcache.errors import EngineError, NonFiniteError, in_one_line
from blockcache.models.noise import draw_all
from blockcache.models.port import Port
from blockcache.models.program import Program
from blockcache.progress import progress_bar
from blockcache.samplers import table
from blockcache.schedule import Schedule, compile_plan

_SAMPLES = 4
_AGREEMENTS = Cache("what a comparison found", "agrees")


def rehearse(port: Port, program: Program, engine: str) -> None:
    """Refuse a foreign policy whose actions come out differently; leaves torch's generators as they were."""
    key = _key(port, program)
    if key is not None and _AGREEMENTS.get(key, lambda path: True):
        return
    reason = disagreement(port, program, getattr(port.policy, port.entry))
    if reason is not None:
        raise EngineError(
            f'the {engine} engine cannot stand in for this policy\'s own predict_action, {reason}; use engine="patched"'
        )
    if key is not None:
        _AGREEMENTS.put(key, Path.touch)


@dataclass(frozen=True, eq=False)
class Trial:
    """One observation at which policy and program are compared.

    Args:
        obs: As the policy's entry takes it.
        read: Gives what the program takes of it, and the start of the noise where the policy's own code drew that.
    """

    obs: Any
    read: Callable[[Any], tuple[dict[str, Tensor], Tensor | None]]


def _made_up(port: Port, like: Tensor) -> Trial:
    inputs = {name: value.to(like) for name, value in port.synthetic_observations(_SAMPLES).items()}
    return Trial(port.prepare_observation(inputs), lambda _: (inputs, None))


def disagreement(port: Port, program: Program, own: Callable[..., Any], trial: Trial | None = None) -> str | None:
    """How the policy's actions differ from the program's at full precision; None if they agree.

    Args:
        port: The policy.
        program: What an engine runs in its place.
        own: The policy's entry as it was before an engine replaced it.
        trial: Where they are compared; at made-up observations without it.
    """
    assert port.sampler is not None
    sampler, names = table(port.sampler), [block.name for block in program.blocks]
    loop = Loop(program, compile_plan(Schedule.every_step(sampler.steps, names)), sampler)
    like = program.like
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        one = trial or _made_up(port, like)
        torch.manual_seed(1)
        try:
            expected = _own_actions(port, own, one.obs, sampler.steps)
        except Exception as error:  # foreign code may raise anything
            if trial is not None and (explained := port.explain(error, one.obs)) is not None:
                raise explained from error
            inputs = " and ".join(map(repr, one.obs)) if isinstance(one.obs, Mapping) else type(one.obs).__name__
            return f"it fails with an observation under {inputs}: {in_one_line(error)}"
        torch.manual_seed(1)
        observed, start = one.read(one.obs)
        chunk = (len(next(iter(observed.values()))), *program.chunk)
        try:
            found = loop(observed, draw_all(sampler, chunk, like, None, start))["action"]
        except NonFiniteError as error:
            return f"since the engine finds no finite answer to a typical observation ({error})"
    if expected.shape != found.shape:
        return f"its actions have shape {tuple(expected.shape)}, the engine's {tuple(found.shape)}"
    scale, offset = torch.as_tensor(port.action_scale).to(like), torch.as_tensor(port.action_offset).to(like)
    gap, normalised = (expected.to(found) - found) * scale, expected.to(found) * scale + offset
    difference = float(gap.abs().max() / normalised.abs().max().clamp(min=1.0))
    if not difference <= torch.finfo(like.dtype).eps ** 0.4:  # 2e-3 in float32; NaN is refused as well
        return f"its actions differ from the engine's by up to {difference:.1g} with the same noise"
    return None


def _own_actions(port: Port, own: Callable[..., Any], obs: Any, steps: int) -> Tensor:
    title = "comparing with the policy's own loop"
    with progress_bar(desc=title, total=steps, unit="step", leave=False, delay=1.0) as bar:
        hook = port.adapter.denoiser.register_forward_hook(lambda *_: bar.update() and None)
        try:
            return port.action_of(own(obs))
        finally:
            hook.remove()


def _key(port: Port, program: Program) -> str | None:
    """Under which it is remembered that this very policy agrees; None for one that cannot be described."""
    try:
        behaviour = describe_policy(port)
    except IndescribableError:
        return None
    code = source_hash(inspect.getfile(type(program)))
    return digest(port.fingerprint.to_dict(), program.signature, code, behaviour)
