"""The generation scope: which step of which generation is running, and who decides what a layer does in it.

A scope opens around one `predict_action` and dies with it. Inside, the step is the position in the sampler's table of
timesteps, verified at every call against the timestep that the denoiser is really given. Outside a scope, and in the
scope of another policy that shares the denoiser, every call runs as if nothing was attached.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from blockcache.attach.patching import Make, Patches
from blockcache.errors import PolicyError, StaleError, StepError
from blockcache.models.adapter import Layer, Route
from blockcache.models.port import Port
from blockcache.observations.tensors import check_finite, largest
from blockcache_runtime.checks import check_generation


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
        return self.args[0]

    def plain(self) -> Tensor:
        """As the module itself does it."""
        return self.original(*self.args, **self.kwargs)

    def routed(self, route: Route) -> Tensor:
        """Block by block: what each adds is whatever `route` returns for it."""
        return self.layer.forward(route, *self.args, **self.kwargs)


class Generation:
    """Decides what each layer does in one generation, and holds all state of that generation; this one changes nothing."""

    def denoise(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the denoiser, layers and all; to be overridden to see what goes in and comes out."""
        return forward(*args, **kwargs)

    def layer(self, call: LayerCall) -> Tensor:
        """What one layer gives at one step."""
        return call.plain()

    def finish(self) -> None:
        """The generation came to its end without an error."""


class _Scope:
    def __init__(
        self, owner: object, generation: Generation, norm: LargestNorm | None = None, step: int = -1, free: bool = False
    ) -> None:
        self.owner, self.generation, self.norm, self.step, self.free = owner, generation, norm, step, free
        self.constants = _ConstantOutputs()


Run: TypeAlias = Callable[[_Scope, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What is done in a generation in place of a method: (scope, method, positional arguments, named ones)."""


_current: ContextVar[_Scope | None] = ContextVar("blockcache_generation", default=None)


@contextmanager
def _opened(scope: _Scope) -> Iterator[None]:
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def explained(port: Port, obs: Any) -> Iterator[None]:
    """What the policy's own code raises, in one sentence where the observation is to blame."""
    try:
        yield
    except Exception as error:  # foreign code may raise anything
        sentence = port.explain(error, obs)
        if sentence is None:
            raise
        raise sentence from error


class Attached(Patches):
    """The patches of `attach`: removing them undoes everything."""

    def at(self, step: int, generation: Generation, free: bool = False) -> AbstractContextManager[None]:
        """Inside, the next denoiser call of this thread is that step of a generation, by itself; where it is `free`, at any
        timestep."""
        return _opened(_Scope(self, generation, step=step - 1, free=free))


def attach(port: Port, begin: Callable[[], Generation], watched: bool = False) -> Attached:
    """Patches with which each `predict_action` of the policy is one generation, to be applied.

    Args:
        port: The policy.
        begin: Makes the Generation that decides what happens in one.
        watched: Whether to refuse the answer of a generation whose numbers left the range of trusted actions.
    """
    patches, last = Attached(), len(port.adapter.layers) - 1

    def scoped(predict_action: Callable[..., Any]) -> Callable[..., Any]:
        names, own = list(inspect.signature(predict_action).parameters), getattr(type(port.policy), port.entry, None)

        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(type(port.policy), port.entry, None) is not own:
                raise StaleError(
                    f"the policy has another {port.entry} than when it was patched; disable() and begin again"
                )
            port.mode.check()
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                check_finite(value, "noise" if name == "noise" else "the observation")
            obs = next(iter((*args, *kwargs.values())), None)
            port.check_observation(obs)
            scope = _Scope(patches, begin(), LargestNorm() if watched else None)
            with nullcontext() if port.reentrant else patches.turn, _opened(scope), explained(port, obs):
                result = predict_action(*args, **kwargs)
            if scope.step + 1 != len(port.timesteps):
                raise StepError(
                    f"the policy took {scope.step + 1} denoising steps, the schedule counts {len(port.timesteps)}; "
                    "was num_inference_steps changed after enabling?"
                )
            if scope.norm is not None:
                with suppress(PolicyError):  # an answer without an action is not judged here
                    scope.norm.see(port.action_of(result))
                check_generation(float(scope.norm.largest()), lambda: largest(obs))
            scope.generation.finish()
            return result

        return call

    def denoise(scope: _Scope, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if scope.free:
            scope.step += 1
        else:
            _advance(scope, port.timesteps, port.adapter.timestep(*args, **kwargs))
        output = scope.generation.denoise(forward, args, kwargs)
        if scope.norm is not None:
            scope.norm.see(output)
        return output

    def layer_of(index: int, layer: Layer) -> Run:
        def run(scope: _Scope, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args:  # a denoiser may hand its layers everything by name
                args = (kwargs.pop(layer.stream),)
            stream = scope.generation.layer(LayerCall(scope.step, index, layer, forward, args, kwargs))
            if scope.norm is not None and index == last:
                scope.norm.see(stream)
            return stream

        return run

    def constant(module: nn.Module) -> Run:
        return lambda scope, *call: scope.constants(module, *call)

    patches.replace_entry(port.policy, port.entry, scoped)
    patches.replace(port.adapter.denoiser, "forward", _in_scope(patches, denoise))
    for index, layer in enumerate(port.adapter.layers):
        patches.replace(layer.module, "forward", _in_scope(patches, layer_of(index, layer)))
    for module in port.adapter.constant:
        patches.replace(module, "forward", _in_scope(patches, constant(module)))
    return patches


def _in_scope(owner: object, run: Run) -> Make:
    """A replacement that calls `run` in a scope of `owner`, and the method itself elsewhere."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            scope = _current.get()
            if scope is None or scope.owner is not owner:
                return forward(*args, **kwargs)
            return run(scope, forward, args, kwargs)

        return call

    return make


class _DenoiserCalledError(BaseException):  # no `Exception`: the policy's own code must not catch it
    pass


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def first_denoiser_call(port: Port, own: Callable[[Any], Any], patches: Patches) -> Callable[[Any], Arguments | None]:
    """A function of an observation: the arguments of the denoiser's first call, or None if the policy makes none.

    The policy's own code runs until the denoiser is called, and is stopped there; so its normaliser, its encoder and all
    else that it does with an observation stay its own. Threads take turns: the policy's code is not known to bear more.

    Args:
        port: The policy.
        own: Its entry as it was before anything replaced it.
        patches: They take the replacement of the denoiser's forward, and must be applied.
    """
    owner = object()

    def stop(scope: _Scope, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        raise _DenoiserCalledError(args, kwargs)

    def first_call(obs: Any) -> Arguments | None:
        check_finite(obs)
        with patches.turn, _opened(_Scope(owner, Generation())), explained(port, obs):
            try:
                own(obs)
            except _DenoiserCalledError as called:
                return called.args[0], called.args[1]
        return None

    patches.replace(port.adapter.denoiser, "forward", _in_scope(owner, stop))
    return first_call


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


class _ConstantOutputs:
    """Outputs of modules that see nothing but conditions, kept within a generation until they are given other numbers.

    That the numbers are the same is compared, not assumed, so what is kept is what would be computed again, to the bit.
    Nothing is kept where gradients are wanted, nor in torch's inference mode, which does not count edits of a tensor.
    """

    def __init__(self) -> None:
        # by module: its input, its output and that one's version
        self._kept: dict[object, tuple[_Input, Tensor, int]] = {}

    def __call__(self, module: object, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """The module's output: computed, unless it is kept."""
        able = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if not able or kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].is_inference():
            return forward(*args, **kwargs)
        known = self._kept.get(module)
        if known is not None:
            given, output, version = known
            if output._version == version and given.is_same(args[0]):
                return output
        output = forward(*args)
        if isinstance(output, Tensor) and not output.is_inference():
            # modules that are given the same tensor share what is known of it
            shared = next((given for given, _, _ in self._kept.values() if given.is_same(args[0])), None)
            self._kept[module] = shared or _Input(args[0]), output, output._version
        return output


class _Input:
    """A tensor as it was given, and the last one that was found to hold the same numbers: a step's layers share one."""

    def __init__(self, value: Tensor) -> None:
        self._first = self._latest = (value, value._version)

    def is_same(self, value: Tensor) -> bool:
        first, version = self._first
        if first._version != version:
            return False  # written into since: its former numbers are lost
        latest, version = self._latest
        if value is latest and value._version == version:
            return True
        alike = first.dtype == value.dtype and first.device == value.device and torch.equal(first, value)
        if alike:
            self._latest = (value, value._version)
        return alike


# -- numbers that left the range of trusted actions

HELD_BYTES = 2**24


class LargestNorm:
    """The largest norm of all rows that were seen. A row of the residual stream keeps whatever a block added to it."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._bytes = 0
        self._found: list[Tensor] = []

    def see(self, value: Any) -> None:
        """(..., d): its rows. Whatever a foreign denoiser may give is taken: tensors with fractions in it count."""
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor) and item.is_floating_point() and item.ndim and item.numel():
                self._held.append(item.detach() if item.requires_grad else item)
                self._bytes += item.nbytes
                if self._bytes > HELD_BYTES:
                    self._measure()

    @torch.no_grad()
    def largest(self) -> Tensor:
        """NaN if one of the numbers was."""
        self._measure()
        return torch.stack(self._found).amax()

    def _measure(self) -> None:
        alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for value in self._held:
            alike.setdefault((value.shape[1:], value.dtype), []).append(value)
        for (_, dtype), held in alike.items():
            wide = torch.promote_types(dtype, torch.float32)  # squares of half precision overflow at 256
            self._found.append(torch.linalg.vector_norm(torch.cat(held), dim=-1, dtype=wide).amax().float())
        self._held, self._bytes = [], 0
