"""A recorded generation walked backwards: the derivative of the executed action by every block's residual, step by step.

A step is computed again, with gradients, from the sample that the denoiser was given there, so only one step's graph
lives at a time, and the policy's own loop need not be differentiable. Knows nothing of what the derivatives are for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockcache.attach.generation import Attached, Generation, LayerCall
from blockcache.errors import BlockcacheError, RecordingError, in_one_line
from blockcache.models.port import Port
from blockcache.models.sampling import mean_step

TOLERANCE = 1e-3
"""How far a step that is computed again may be from the recorded one, as a share of the largest value (1 at least)."""
CONSTANT = 1e-6
"""Numbers of the action that vary by less say nothing of their samples: they never changed in training."""


@dataclass(frozen=True, eq=False)
class DenoiserCall:
    """What the denoiser was given at a step, and what it gave."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Tensor

    @classmethod
    def watched(
        cls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, DenoiserCall]:
        """Call the denoiser: what it returned, and a record that later changes in place do not reach."""
        held = _copied(args), _copied(kwargs)
        out = forward(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise RecordingError(f"action costs need a denoiser that returns a tensor, got {type(out).__name__}")
        return out, cls(*held, _copied(out))


@dataclass(frozen=True, eq=False)
class Recorded:
    """A generation of B samples, as far as it is needed to walk it back.

    Args:
        calls: Of the denoiser, by step.
        residuals: By block, (K, B, F) in single precision on the CPU.
        action: What the policy returned, (B, n, A).
        vectors: (V, B, n, A) over the executed actions in normalised units.
    """

    calls: Sequence[DenoiserCall]
    residuals: Sequence[Tensor]
    action: Tensor
    vectors: Tensor

    @property
    def size(self) -> int:
        return len(self.action)


def walk_back(port: Port, attached: Attached, run: Recorded) -> Iterator[tuple[int, list[Tensor]]]:
    """From the last step to the first: the step, and d(v . action)/d residual by block, (V, B, F) on the CPU.

    `action` is the executed one in normalised units, a part of the last sample.
    """
    samples = [_sample(port, call) for call in run.calls]
    free, x0s = _free(samples), _check_sampling(port, run, samples)
    acting = port.action_mask(*run.calls[-1].args, **run.calls[-1].kwargs)
    slopes = [_Slope(_placed(port, vector, samples[-1]) * acting) for vector in run.vectors]
    for step in reversed(range(len(samples))):
        before = x0s[step - 1].detach() if step else None  # what predicts the clean sample gives x0 itself
        slopes, gradients = _step_back(port, attached, step, run.calls[step], samples[step], before, slopes)
        slopes = [replace(slope, x=slope.x * free) for slope in slopes]
        yield step, gradients


@dataclass(frozen=True, eq=False)
class _Slope:
    """d(v . action) by a sample, and by the x0 that comes with it where the next step uses that."""

    x: Tensor
    x0: Tensor | None = None


def _step_back(
    port: Port,
    attached: Attached,
    step: int,
    call: DenoiserCall,
    sample: Tensor,
    x0_prev: Tensor | None,
    slopes: Sequence[_Slope],
) -> tuple[list[_Slope], list[Tensor]]:
    """The slopes by what a step gives -> those by what it is given, and by the blocks' residuals within it."""
    assert port.sampler is not None
    noting, x = _NotingGeneration(), sample.requires_grad_()
    before = [] if x0_prev is None else [x0_prev.requires_grad_()]
    try:
        with torch.enable_grad():
            out = _denoise(port, attached, step, call, x.clone(), noting)
            mean, x0, _ = mean_step(port.sampler, step, x, out, x0_prev)
            inputs, found = [x, *before, *noting.residuals.values()], []
            for slope in slopes:
                outputs, by = ([mean], [slope.x]) if slope.x0 is None else ([mean, x0], [slope.x, slope.x0])
                found.append(torch.autograd.grad(outputs, inputs, by, retain_graph=True, allow_unused=True))
    except BlockcacheError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise _not_differentiable(port, in_one_line(error)) from error
    gradients = _checked(port, step, noting, [item[1 + len(before) :] for item in found])
    back = [_Slope(item[0], item[1] if before else None) for item in found]
    if not all(bool(torch.isfinite(slope.x).all()) for slope in back):
        raise _not_finite(f"the sample before {port.adapter.blocks[0].name}", step)
    return back, gradients


class _NotingGeneration(Generation):
    """Everything is computed, and the residuals are noted with their graph."""

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}

    def layer(self, call: LayerCall) -> Tensor:
        return call.routed(self._route)

    def _route(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        self.residuals[name] = residual = compute()
        return residual


def _denoise(
    port: Port, attached: Attached, step: int, call: DenoiserCall, x: Tensor, noting: _NotingGeneration
) -> Tensor:
    """The denoiser's output at a recorded step, as a function of the sample `x`."""
    args, kwargs = (x, *call.args[1:]), dict(call.kwargs)
    if not call.args:
        args, kwargs[_sample_name(port)] = (), x
    with attached.at(step, noting):
        out: Tensor = port.adapter.denoiser(*args, **kwargs)
    if not _close(out.detach(), call.out):
        raise RecordingError(
            f"the denoiser gave another output at step {step} when it was given the same input again, so its actions "
            "cannot be differentiated; calibrate without action costs"
        )
    for name, value in {"its output": out, **noting.residuals}.items():
        if not value.requires_grad:
            raise _not_differentiable(port, f"{name} has no gradient at step {step}")
    return out


def _checked(
    port: Port, step: int, noting: _NotingGeneration, found: Sequence[Sequence[Tensor | None]]
) -> list[Tensor]:
    """The gradients by block of the port, (V, B, F); a missing one, NaN and infinity are refused by name."""
    by_name: dict[str, Tensor] = {}
    for name, *slopes in zip(noting.residuals, *found, strict=True):
        known = [slope.flatten(1).to("cpu", torch.float32) for slope in slopes if slope is not None]
        if len(known) < len(slopes):
            raise _not_differentiable(port, f"{name} has no gradient at step {step}")
        by_name[name] = torch.stack(known)
    for name in reversed(by_name):  # gradients come from behind: the last bad one is the first to go wrong
        if not bool(torch.isfinite(by_name[name]).all()):
            raise _not_finite(name, step)
    return [by_name[block.name] for block in port.adapter.blocks]


def _check_sampling(port: Port, run: Recorded, samples: Sequence[Tensor]) -> list[Tensor]:
    """Each step's x0, from the recorded outputs; refused if the samples or the action are not those of the table."""
    assert port.sampler is not None
    free, x0s, drawn = _free(samples), list[Tensor](), list[Tensor]()
    before: Tensor | None = None
    for step, call in enumerate(run.calls):
        mean, before, spread = mean_step(port.sampler, step, samples[step], call.out, before)
        x0s.append(before)
        if step + 1 < len(samples):
            found, expected = samples[step + 1][free], mean[free]
        else:
            start, stop = port.executed
            scale, offset = (torch.as_tensor(item).to(mean) for item in (port.action_scale, port.action_offset))
            acting = mean * port.action_mask(*call.args, **call.kwargs)
            found, expected = run.action.to(mean) * scale + offset, acting[:, start:stop, : run.action.shape[-1]]
            still = found.amax(dim=(0, 1)) - found.amin(dim=(0, 1)) < CONSTANT
            found = torch.where(still, expected, found) if found.shape == expected.shape else found
        fits = found.shape == expected.shape
        if fits and spread > TOLERANCE:
            drawn.append((found - expected).flatten() / spread)
        elif not fits or not _close(found, expected):
            what = "the next sample" if step + 1 < len(samples) else "the executed action"
            raise _not_the_table(port, f"{what} is not what step {step} gives")
    if drawn:  # noise that was not handed over can be judged by its size only
        noise = torch.cat(drawn).double()
        size = float(noise.square().mean().sqrt())
        if not abs(size - 1) < 6 / math.sqrt(2 * len(noise)) + 0.01:
            raise _not_the_table(port, f"what is added to the steps is {size:.2f} of the noise that it should be")
    return x0s


def _free(samples: Sequence[Tensor]) -> Tensor:
    """(B, T, D) which values a step decides; those that are the same at all steps are in-painted before each."""
    changes = [sample != samples[0] for sample in samples[1:]]
    return torch.stack(changes).any(dim=0) if changes else torch.ones_like(samples[0], dtype=torch.bool)


def _placed(port: Port, vector: Tensor, sample: Tensor) -> Tensor:
    """A vector over the executed actions as one over the whole sample."""
    (start, stop), placed = port.executed, torch.zeros_like(sample)
    placed[:, start:stop, : vector.shape[-1]] = vector.to(placed)
    return placed


def _sample(port: Port, call: DenoiserCall) -> Tensor:
    sample = call.args[0] if call.args else call.kwargs[_sample_name(port)]
    return sample.detach()


def _sample_name(port: Port) -> str:
    """The name of the denoiser's first argument."""
    return list(inspect.signature(type(port.adapter.denoiser).forward).parameters)[1]


def _close(found: Tensor, expected: Tensor) -> bool:
    share = max(TOLERANCE, 10 * torch.finfo(expected.dtype).eps)
    limit = share * max(1.0, float(expected.abs().max()))
    return bool(((found - expected).abs() <= limit).all())


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        with torch.inference_mode(False):  # what was made in it could not be differentiated later
            return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return tuple(map(_copied, value)) if isinstance(value, list | tuple) else value


def _not_differentiable(port: Port, reason: str) -> RecordingError:
    kind = type(port.adapter.denoiser).__name__
    return RecordingError(
        f"the denoiser {kind} cannot be differentiated ({reason}), which action costs need; calibrate without them"
    )


def _not_finite(what: str, step: int) -> RecordingError:
    return RecordingError(
        f"the gradient of the executed action by {what} at step {step} is NaN or infinite; check the policy's weights, or "
        "calibrate without action costs"
    )


def _not_the_table(port: Port, reason: str) -> RecordingError:
    settings = port.sampling.settings
    return RecordingError(
        f"{type(port.policy).__name__} does not sample as its sampler's table says ({settings['type']}: {reason}), so its "
        "steps cannot be walked back; calibrate without action costs"
    )
