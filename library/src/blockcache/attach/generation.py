"""The generation scope: which step of which generation is running, and who decides what a layer does in it.

A scope opens around one `predict_action` and dies with it. Inside, the step is the position in the sampler's table of
timesteps, verified at every call against the timestep that the denoiser is really given. Outside a scope, and in the
scope of another policy that shares the denoiser, every call runs as if we were not there.
"""

from __future__ import annotations

import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from blockcache.attach.constant_outputs import ConstantOutputs
from blockcache.attach.patching import Patches
from blockcache.errors import StepError
from blockcache.models.adapter import Layer, Route
from blockcache.models.port import Port
from blockcache.observations.tensors import check_finite


@dataclass(slots=True, eq=False)
class LayerCall:
    """One layer of the stack is called at one step. The residual stream is the first of `args`."""

    step: int
    index: int
    layer: Layer
    original: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def stream(self) -> Tensor:
        stream: Tensor = self.args[0]
        return stream

    def plain(self) -> Tensor:
        """As the module itself does it."""
        return self.original(*self.args, **self.kwargs)

    def routed(self, route: Route) -> Tensor:
        """Block by block: what each adds is whatever `route` returns for it."""
        return self.layer.forward(route, *self.args, **self.kwargs)


class Generation(ABC):
    """Decides what each layer does in one generation, and holds all state of that generation."""

    def denoise(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the denoiser, layers and all; for who wants to see what goes in and comes out."""
        return forward(*args, **kwargs)

    @abstractmethod
    def layer(self, call: LayerCall) -> Tensor:
        """What one layer gives at one step."""

    def finish(self) -> None:  # noqa: B027
        """The generation came to its end without an error."""


class Watcher(Protocol):
    """Looks on at one generation; what it raises at the end takes the answer's place."""

    def see(self, value: Any) -> None:
        """Of each step the stream behind the last layer, and what the denoiser gives back."""
        ...

    def end(self, obs: Any, returned: Any) -> None:
        """What was asked, and what is about to be answered."""
        ...


class _Scope:
    def __init__(self, owner: object, generation: Generation, watcher: Watcher | None) -> None:
        self.owner = owner
        self.generation = generation
        self.watcher = watcher
        self.kept = ConstantOutputs()
        self.step = -1


_current: ContextVar[_Scope | None] = ContextVar("blockcache_generation", default=None)


class Attached(Patches):
    """The patches of `attach`: removing them undoes everything."""

    @contextmanager
    def at(self, step: int, generation: Generation) -> Iterator[None]:
        """Inside, the next denoiser call of this thread is that step of a generation, by itself."""
        scope = _Scope(self, generation, None)
        scope.step = step - 1
        token = _current.set(scope)
        try:
            yield
        finally:
            _current.reset(token)


def attach(port: Port, begin: Callable[[], Generation], watch: Callable[[], Watcher | None] = lambda: None) -> Attached:
    """From now on each `predict_action` of the policy is one generation, decided by a Generation that `begin` makes.

    `watch` makes who looks on, if anybody.
    """
    owner = patches = Attached()
    guard = nullcontext() if port.reentrant else threading.RLock()

    last = len(port.adapter.layers) - 1

    def scoped(predict_action: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(predict_action).parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            port.mode.check()
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                check_finite(value, "noise" if name == "noise" else "the observation")
            obs = next(iter((*args, *kwargs.values())), None)
            port.check_observation(obs)
            scope = _Scope(owner, begin(), watch())
            with guard:
                token = _current.set(scope)
                try:
                    result = predict_action(*args, **kwargs)
                except Exception as error:  # foreign code may raise anything
                    explained = port.explain(error, obs)
                    if explained is None:
                        raise
                    raise explained from error
                finally:
                    _current.reset(token)
            if scope.step + 1 != len(port.timesteps):
                raise StepError(
                    f"the policy took {scope.step + 1} denoising steps, the schedule counts {len(port.timesteps)}; "
                    "was num_inference_steps changed after enabling?"
                )
            if scope.watcher is not None:
                scope.watcher.end(obs, result)
            scope.generation.finish()
            return result

        return call

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            scope = _current.get()
            if scope is None or scope.owner is not owner:
                return forward(*args, **kwargs)
            _advance(scope, port.timesteps, port.adapter.timestep(*args, **kwargs))
            output = scope.generation.denoise(forward, args, kwargs)
            if scope.watcher is not None:
                scope.watcher.see(output)
            return output

        return call

    def routed(index: int, layer: Layer) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                scope = _current.get()
                if scope is None or scope.owner is not owner:
                    return forward(*args, **kwargs)
                if not args:  # a denoiser may hand its layers everything by name
                    args = (kwargs.pop(layer.stream),)
                stream = scope.generation.layer(LayerCall(scope.step, index, layer, forward, args, kwargs))
                if scope.watcher is not None and index == last:
                    scope.watcher.see(stream)
                return stream

            return call

        return make

    def kept(module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                scope = _current.get()
                if scope is None or scope.owner is not owner:
                    return forward(*args, **kwargs)
                return scope.kept(module, forward, args, kwargs)

            return call

        return make

    try:
        patches.replace_entry(port.policy, port.entry, scoped)
        patches.replace(port.adapter.denoiser, "forward", counted)
        for index, layer in enumerate(port.adapter.layers):
            patches.replace(layer.module, "forward", routed(index, layer))
        for module in port.adapter.constant:
            patches.replace(module, "forward", kept(module))
    except BaseException:
        patches.remove()
        raise
    return patches


def _advance(scope: _Scope, timesteps: tuple[float, ...], given: Any) -> None:
    values = torch.as_tensor(given).reshape(-1)
    timestep = float(values[0])
    step = scope.step + 1
    if bool((values != values[0]).any()):
        raise StepError("the denoiser was given different timesteps for the samples of one batch")
    if step >= len(timesteps) or not math.isclose(timestep, timesteps[step], rel_tol=1e-6, abs_tol=1e-9):
        expected = f"{timesteps[step]:g}" if step < len(timesteps) else "no further call"
        raise StepError(
            f"denoising step {step}: the denoiser got timestep {timestep:g}, the sampler's table says {expected}; "
            "was the sampler changed after enabling?"
        )
    scope.step = step
