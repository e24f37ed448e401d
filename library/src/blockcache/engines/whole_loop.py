"""What the loop and onnx engines share: they replace the policy's entry as a whole and run a copy of the weights."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from blockcache.attach.patching import Patches
from blockcache.engines.build import Build
from blockcache.engines.front import Front
from blockcache.engines.guard import PARTS, Guard
from blockcache.engines.rehearsal import Given, disagreement
from blockcache.engines.stats import Counts
from blockcache.errors import EngineError, ObservationError, StaleError
from blockcache.models.noise import check_noise, draw_all
from blockcache.models.port import Port
from blockcache.models.program import Program


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


@dataclass(frozen=True, eq=False)
class InPlace:
    """An engine in its place: the way to undo it, and to ask whether the policy is still what it was made of."""

    patches: Patches
    verify: Callable[[], None] = lambda: None  # an engine that copies nothing has nothing to verify
    noticed_within: int = 1


def attach_runner(port: Port, built: Build, runner: Runner, counts: Counts) -> InPlace:
    """Replace the policy's entry by the runner."""
    guard, own, patches = Guard(port), getattr(port.policy, port.entry), Patches()
    program, sampler, schedule, like = built.program, built.sampler, built.schedule, built.program.like
    computed = {name: len(steps) for name, steps in schedule.updates.items()}
    reused = {name: schedule.steps - count for name, count in computed.items()}
    try:
        look = _Behind(port, program, own, patches) if port.begins_after_encoder else _Whole(port, program, own)

        def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
            name = next(iter(inspect.signature(original).parameters))  # the public code's is obs_dict

            def predict_action(
                *given: Any, generator: torch.Generator | None = None, noise: Tensor | None = None, **named: Any
            ) -> Any:
                if len(given) + len(named) != 1 or set(named) - {name}:
                    raise TypeError(f"{port.entry} takes one observation ({name}), got {[*map(type, given), *named]}")
                (obs,) = given or named.values()
                refuse_autocast(like)
                guard.check()
                observed, start = look(obs)
                chunk = (len(next(iter(observed.values()))), *program.chunk)
                if noise is not None:
                    drawn = check_noise(noise, sampler, chunk, like)
                else:
                    drawn = draw_all(sampler, chunk, like, generator, start if generator is None else None)
                result = runner(observed, drawn)
                counts.add(computed, reused)
                return port.entry_result(result)

            return predict_action

        def verify() -> None:
            guard.check_everything()
            reason = look.disagreement()
            if reason is not None:
                raise StaleError(f"the policy no longer acts as this engine, {reason}; disable() and accelerate again")

        patches.replace_entry(port.policy, port.entry, replacement)
    except BaseException:
        patches.remove()
        raise
    guard.check()  # notes that the entry is ours, so that the first call need not
    return InPlace(patches, verify, PARTS)


class _Whole:
    """The program holds everything: an observation goes in as it is."""

    def __init__(self, port: Port, program: Program, own: Callable[..., Any]) -> None:
        self._port, self._program, self._own = port, program, own
        self._foreign = not port.trusted

    def __call__(self, obs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        observed = self._port.read_observation(obs, self._program.like)
        if self._foreign and isinstance(obs, Mapping):
            _refuse_unread(obs, self._program.inputs)
        return observed, None

    def disagreement(self) -> str | None:
        return disagreement(self._port, self._program, self._own)


class _Behind:
    """The program begins behind the policy's own encoder. What such a policy observes is not known beforehand, so it is
    compared with the program at its first observation."""

    def __init__(self, port: Port, program: Program, own: Callable[..., Any], patches: Patches) -> None:
        self._port, self._program, self._own = port, program, own
        self._front = Front(port, own, patches)
        self._first: Any = None
        self._lock = threading.Lock()

    def __call__(self, obs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        with self._lock:
            if self._first is None:
                self._compare(obs)
        return self._look(obs)

    def _look(self, obs: Any) -> tuple[dict[str, Tensor], Tensor]:
        features, start = self._front(obs)
        (shape,) = self._program.inputs.values()
        (found,) = features.values()
        if tuple(found.shape[1:]) != shape:
            raise EngineError(
                f"the encoder's features have shape {tuple(found.shape)}, the denoiser takes (batch, "
                f'{", ".join(map(str, shape))}); use engine="patched"'
            )
        return features, start

    def _compare(self, obs: Any) -> None:
        reason = disagreement(self._port, self._program, self._own, Given(obs, self._look))
        if reason is not None:
            raise EngineError(
                f"this engine cannot stand in for the policy's own {self._port.entry}, {reason}; disable() and use "
                'engine="patched"'
            )
        self._first = copy.deepcopy(obs)

    def disagreement(self) -> str | None:
        if self._first is None:
            return None  # the first observation is going to tell
        return disagreement(self._port, self._program, self._own, Given(self._first, self._look))


def _refuse_unread(obs: Mapping[Any, Any], inputs: Mapping[str, Any]) -> None:
    """Code that we do not know may read more of an observation than the program does; it was compared without."""
    unread = [str(name) for name in obs if name not in inputs]
    if unread:
        raise ObservationError(
            f"the observation holds {', '.join(unread)} besides {', '.join(inputs)}, which this engine does not read but "
            'the policy may; leave it out, or use engine="patched"'
        )
