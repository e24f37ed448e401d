"""A guard around an accelerated policy: it judges each observation, and what is outside the policy itself may answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.attach.patching import Patches
from blockcache.errors import EngineError, ObservationError
from blockcache.models.port import Port
from blockcache.observations import pick
from blockcache.observations.guard import fit
from blockcache_runtime.chunks import Previous
from blockcache_runtime.guard import FULL, Guard, GuardWatch


def fit_guard(port: Port, action: str, observations: Any, names: Container[str] | None = None) -> Guard:
    """A guard for a policy.

    Args:
        port: The policy.
        action: See `blockcache_runtime.guard.ACTIONS`.
        observations: What the policy sees in its task, a batch of 32 or more.
        names: Inputs that it may look at; all of them without it.
    """
    if observations is None:
        raise ObservationError("a guard is fitted to observations of the policy's task, got none; give them as well")
    seen = observations if isinstance(observations, Mapping) else {next(iter(port.inputs), "obs"): observations}
    inputs = {name: shape for name, shape in port.inputs.items() if names is None or name in names}
    return fit(seen, inputs, port.cameras, action)


def watch_entry(
    policy: Any, port: Port, original: Port, guard: Guard, patches: Patches, rtc: bool = False
) -> GuardWatch:
    """Have a guard judge whatever the policy is asked, from when the patches are applied on.

    With the action "full", what is outside is answered by the policy's own code and sampler, sample by sample.

    Args:
        policy: Whose entry is replaced.
        port: Reads its observations.
        original: The policy before it was tuned, executing as many actions: it answers for "full".
        guard: What to judge by.
        patches: They replace the entry already.
        rtc: Whether the engine takes `previous`, which the policy has to take too then if it is to answer.
    """
    watch, like = GuardWatch(guard), next(port.adapter.denoiser.parameters())

    def make(fast: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        own = own if original.policy is policy else getattr(original.policy, original.entry)
        name, *taken = (parameters := inspect.signature(own).parameters)
        any_name = inspect.Parameter.VAR_KEYWORD in {one.kind for one in parameters.values()}
        falls_back = guard.action == FULL

        def check(names: Iterable[str]) -> None:
            """At every call, not only where something is outside."""
            if "noise" in names:
                raise EngineError(
                    "a guard that falls back draws the noise of full precision itself; give a generator, not noise"
                )
            if odd := [] if any_name else [key for key in names if key not in taken]:
                raise EngineError(
                    f"the policy itself takes no {odd[0]}, so that a guard cannot fall back to it; leave it out"
                )

        if falls_back and rtc:
            check(["previous"])

        def predict_action(*given: Any, **named: Any) -> Any:
            obs, rest = (given[0], given[1:]) if given else (named[name], ())
            more = {key: value for key, value in named.items() if key != name}
            if falls_back:
                check([key for key, value in [*zip(taken, rest, strict=False), *more.items()] if value is not None])
            read = port.read_observation(obs, like)
            judged = watch.judge({key: np.asarray(value.detach().cpu()) for key, value in read.items()})
            places = np.flatnonzero(judged.outside) if falls_back else ()
            if not len(places):
                return fast(*given, **named)
            batch = len(judged.scores)
            found = fast(*given, **named) if len(places) < batch else None  # first: it draws as if nothing was outside
            chosen = {key: _chosen(value, places, batch) for key, value in more.items() if key in taken or any_name}
            full = own(pick(obs, places), *(_chosen(value, places, batch) for value in rest), **chosen)
            return full if found is None else _merged(found, full, places)

        return predict_action

    patches.wrap(policy, port.entry, make)
    return watch


def _chosen(value: Any, places: Any, batch: int) -> Any:
    """An argument beside the observation, for some of the batch."""
    if not isinstance(value, Previous):
        return value
    actions = np.asarray(value.actions)
    rows = [np.broadcast_to(each, (batch,))[places] for each in (value.delay, value.overlap)]
    return Previous(actions[places] if actions.ndim == 3 else actions, *rows)


def _merged(fast: Any, full: Any, places: Any) -> Any:
    """The answer for the whole batch, with those at some places replaced."""
    if isinstance(fast, Mapping):
        return {name: _merged(value, full[name], places) if name in full else value for name, value in fast.items()}
    if not isinstance(fast, Tensor) or not isinstance(full, Tensor) or len(full) != len(places):
        raise EngineError("a guard cannot fall back for a part of this policy's batch; ask for one sample at a time")
    merged = fast.clone()
    merged[torch.as_tensor(places)] = full.to(fast)
    return merged
