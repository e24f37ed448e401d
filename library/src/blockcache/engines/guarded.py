"""A guard around an accelerated policy: it judges each observation, and what is outside the policy itself may answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
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


def watch_entry(policy: Any, port: Port, guard: Guard, patches: Patches) -> GuardWatch:
    """Have a guard judge whatever the policy is asked, from when the patches are applied on.

    With the action "full", what is outside is answered by the policy's own code and sampler, sample by sample.

    Args:
        policy: Whose entry is replaced.
        port: Reads its observations.
        guard: What to judge by.
        patches: They replace the entry already.
    """
    watch, like = GuardWatch(guard), next(port.adapter.denoiser.parameters())

    def make(fast: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        name, *taken = inspect.signature(own).parameters

        def predict_action(*given: Any, **named: Any) -> Any:
            obs = given[0] if given else named[name]
            read = port.read_observation(obs, like)
            judged = watch.judge({key: np.asarray(value.detach().cpu()) for key, value in read.items()})
            places = np.flatnonzero(judged.outside) if guard.action == FULL else ()
            if not len(places):
                return fast(*given, **named)
            batch, more = len(judged.scores), {key: value for key, value in named.items() if key != name}
            more = _chosen(more, places, taken, batch)
            found = fast(*given, **named) if len(places) < batch else None  # first: it draws as if nothing was outside
            full = own(pick(obs, places), **more)
            return full if found is None else _merged(found, full, places)

        return predict_action

    patches.wrap(policy, port.entry, make)
    return watch


def _chosen(named: Mapping[str, Any], places: Any, taken: list[str], batch: int) -> dict[str, Any]:
    """Arguments beside the observation, for some of the batch."""
    if "noise" in named:
        raise EngineError(
            "a guard that falls back draws the noise of full precision itself; give a generator, not noise"
        )
    if odd := [name for name in named if name not in taken]:
        raise EngineError(f"the policy itself takes no {odd[0]}, so that a guard cannot fall back to it; leave it out")
    found = dict(named)
    if isinstance(told := found.get("previous"), Previous):
        actions = np.asarray(told.actions)
        rows = [np.broadcast_to(value, (batch,))[places] for value in (told.delay, told.overlap)]
        found["previous"] = Previous(actions[places] if actions.ndim == 3 else actions, *rows)
    return found


def _merged(fast: Any, full: Any, places: Any) -> Any:
    """The answer for the whole batch, with those at some places replaced."""
    if isinstance(fast, Mapping):
        return {name: _merged(value, full[name], places) if name in full else value for name, value in fast.items()}
    if not isinstance(fast, Tensor) or not isinstance(full, Tensor) or len(full) != len(places):
        raise EngineError("a guard cannot fall back for a part of this policy's batch; ask for one sample at a time")
    merged = fast.clone()
    merged[torch.as_tensor(places)] = full.to(fast)
    return merged
