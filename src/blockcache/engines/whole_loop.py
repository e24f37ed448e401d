"""What the loop and onnx engines share: they replace the policy's entry as a whole and run a copy of the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from blockcache.attach.patching import Patches
from blockcache.engines.build import Build
from blockcache.engines.guard import WeightsGuard
from blockcache.engines.stats import Counts
from blockcache.errors import EngineError
from blockcache.models.noise import check_noise, draw_all
from blockcache.models.port import Port


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


class Runner(Protocol):
    """obs by name in robot units, noise (1 + draws, B, horizon, D) -> what `predict_action` returns."""

    def __call__(self, obs: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]: ...


def attach_runner(port: Port, built: Build, runner: Runner, counts: Counts) -> Patches:
    """Replace the policy's entry by the runner."""
    guard, settings = WeightsGuard(port.module), port.settings()
    program, sampler, schedule, like = built.program, built.sampler, built.schedule, built.program.like
    computed = {name: len(steps) for name, steps in schedule.updates.items()}
    reused = {name: schedule.steps - count for name, count in computed.items()}

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        name = next(iter(inspect.signature(original).parameters))  # the public code's is obs_dict

        def predict_action(
            *given: Any, generator: torch.Generator | None = None, noise: Tensor | None = None, **named: Any
        ) -> Any:
            if len(given) + len(named) != 1 or set(named) - {name}:
                raise TypeError(f"{port.entry} takes one observation ({name}), got {[*map(type, given), *named]}")
            (obs,) = given or named.values()
            port.mode.check()
            refuse_autocast(like)
            guard.check()
            if port.settings() != settings:
                raise EngineError(
                    "the policy's sampler or sizes changed after this engine was built; disable() and accelerate again"
                )
            observed = port.observe(obs, like)
            chunk = (len(next(iter(observed.values()))), *program.chunk)
            drawn = (
                draw_all(sampler, chunk, like, generator) if noise is None else check_noise(noise, sampler, chunk, like)
            )
            result = runner(observed, drawn)
            counts.add(computed, reused)
            return port.answer(result)

        return predict_action

    patches = Patches()
    patches.replace(port.policy, port.entry, replacement)
    return patches
