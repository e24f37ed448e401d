"""Outputs of modules that see nothing but conditions, kept within a generation until the modules are given other numbers.

That the numbers are the same is compared, not assumed, so what is kept is what would be computed again, to the bit. Knows
nothing of generations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ConstantOutputs:
    """The outputs of one generation; for one thread at a time.

    Nothing is kept where gradients are wanted, nor in torch's inference mode, which does not count edits of a tensor.
    """

    def __init__(self) -> None:
        self._kept: dict[
            object, tuple[_Input, Tensor, int]
        ] = {}  # by module: its input, its output and that one's version

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
