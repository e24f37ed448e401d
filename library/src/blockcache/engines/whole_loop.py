"""What the loop and onnx engines share: they replace the policy's entry as a whole and run a copy of the weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.attach.generation import first_denoiser_call
from blockcache.attach.patching import Patches
from blockcache.engines.build import Build, refuse_autocast
from blockcache.engines.handle import Counts, PreparedEngine
from blockcache.engines.rehearsal import SECOND_CALL, TWO_AT_ONCE, Runner, Trial, compare, runner_difference
from blockcache.engines.staleness import PARTS, StaleGuard
from blockcache.errors import EngineError, ObservationError, StaleError
from blockcache.models.port import Port
from blockcache.models.sampling import check_noise, draw_all
from blockcache.observations import pick
from blockcache_runtime.chunks import Previous


def prepare_runner(port: Port, built: Build, runner: Runner, counts: Counts) -> PreparedEngine:
    """A runner in place of the policy's entry."""
    guard, own, patches = StaleGuard(port), getattr(port.policy, port.entry), Patches()
    program, sampler, schedule, like = built.program, built.sampler, built.schedule, built.program.like
    computed = {name: len(steps) for name, steps in schedule.updates.items()}
    reused = {name: schedule.steps - count for name, count in computed.items()}

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        name = next(iter(inspect.signature(original).parameters))  # the public code's is obs_dict

        def predict_action(
            *given: Any,
            generator: torch.Generator | None = None,
            noise: Tensor | None = None,
            previous: Previous | None = None,
            **named: Any,
        ) -> Any:
            if len(given) + len(named) != 1 or set(named) - {name}:
                raise TypeError(f"{port.entry} takes one observation ({name}), got {[*map(type, given), *named]}")
            (obs,) = given or named.values()
            refuse_autocast(like)
            guard.check()
            observed, start = reader(obs)
            chunk = (len(next(iter(observed.values()))), *program.chunk)
            if noise is not None:
                drawn = check_noise(noise, sampler, chunk, like)
            else:
                drawn = draw_all(sampler, chunk, like, generator, start if generator is None else None)
            told = {} if previous is None else built.told_inputs(previous, len(drawn[0]))
            result = runner({**observed, **told}, drawn)
            counts.add(computed, reused)
            return port.entry_result(result)

        return predict_action

    def verify() -> None:
        guard.check_everything()
        trials = reader.trials()
        if trials is None:
            return
        reason = compare(port, built, own, trials).reason or runner_difference(port, built, runner, trials)
        if reason is not None:
            raise StaleError(f"the policy no longer acts as this engine, {reason}; disable() and accelerate again")

    reader = _FeatureReader(port, built, own, patches) if port.begins_after_encoder else _ObservationReader(port, built)
    patches.replace_entry(port.policy, port.entry, replacement)
    # the guard is to see that the entry is replaced before the first call, which would look at everything
    return PreparedEngine(patches, guard.check, verify, PARTS, built.compared.seconds)


class _ObservationReader:
    """Reads an observation for a program that holds everything: it goes in as it is."""

    def __init__(self, port: Port, built: Build) -> None:
        self._port, self._program, self._longer_history = port, built.program, built.compared.longer_history
        self._foreign = not port.trusted

    def __call__(self, obs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        """What the program takes; no start of the noise."""
        observed = self._port.read_observation(obs, self._program.like)
        if self._foreign and isinstance(obs, Mapping):
            self._refuse_more(obs)
        return observed, None

    def _refuse_more(self, obs: Mapping[Any, Any]) -> None:
        """Foreign code may read more of an observation than the program does; it was compared without."""
        inputs = self._program.inputs
        unread = [str(name) for name in obs if name not in inputs]
        if unread:
            raise ObservationError(
                f"the observation holds {', '.join(unread)} besides {', '.join(inputs)}, which this engine "
                'does not read but the policy may; leave it out, or use engine="patched"'
            )
        # a number for each sample, such as RDT's control frequency, may come without an axis of its own
        longer = [name for name, shape in inputs.items() if np.shape(obs[name])[1:2] > (shape[0],)]
        if longer and not self._longer_history:
            raise ObservationError(
                f"the observation {longer[0]!r} has {len(obs[longer[0]][0])} moments, of which this engine takes "
                f"{inputs[longer[0]][0]}, and the policy itself refuses such a history; leave out the oldest"
            )

    def trials(self) -> Sequence[Trial] | None:
        """None in particular: policy and engine can be compared at made-up observations."""
        return ()


class _FeatureReader:
    """Reads an observation for a program that begins behind the policy's own encoder, by running that.

    What such a policy observes is not known beforehand, so it is compared with the program at its first observation.
    """

    def __init__(self, port: Port, built: Build, own: Callable[..., Any], patches: Patches) -> None:
        self._port, self._built, self._program, self._own = port, built, built.program, own
        self._first_call = first_denoiser_call(port, own, patches)
        self._patches = patches
        self._first_obs: Any = None

    def __call__(self, obs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        """The encoder's features, and the start of the noise as the policy drew it."""
        with self._patches.turn:
            if self._first_obs is None:
                self._compare(obs)
        return self._read(obs)

    def _read(self, obs: Any) -> tuple[dict[str, Tensor], Tensor]:
        arguments = self._first_call(obs)
        if arguments is None:
            raise EngineError(
                f'{self._port.entry} answered without its denoiser, which this engine stands for; use engine="patched"'
            )
        features, start = self._port.inputs_from_call(*arguments[0], **arguments[1])
        (shape,), (found,) = self._program.inputs.values(), features.values()
        if tuple(found.shape[1:]) != shape:
            raise EngineError(
                f"the encoder's features have shape {tuple(found.shape)}, the denoiser takes (batch, "
                f'{", ".join(map(str, shape))}); use engine="patched"'
            )
        return features, start

    def _compare(self, obs: Any) -> None:
        reason = compare(self._port, self._built, self._own, self._trials_at(obs)).reason
        if reason is not None:
            raise EngineError(
                f"this engine cannot stand in for the policy's own {self._port.entry}, {reason}; disable() and use "
                'engine="patched"'
            )
        self._first_obs = copy.deepcopy(obs)

    def _trials_at(self, obs: Any) -> list[Trial]:
        """Two calls in a row; and one of two observations at once, where it is one observation that can be doubled."""
        calls = [Trial(obs, self._read, what) for what in ("", SECOND_CALL)]
        values = obs.values() if isinstance(obs, Mapping) else [obs]
        if all(tuple(getattr(value, "shape", ()))[:1] == (1,) for value in values):
            calls.append(Trial(pick(obs, [0, 0]), self._read, TWO_AT_ONCE))
        return calls

    def trials(self) -> Sequence[Trial] | None:
        """At the first observation; None before there was one, which is going to tell."""
        return None if self._first_obs is None else self._trials_at(self._first_obs)
