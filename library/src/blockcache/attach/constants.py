"""What modules that see nothing but conditions gave in a generation, kept until they are given other numbers.

That the numbers are the same is looked at, not assumed, so what is kept is what would be computed again, to the bit. Knows
nothing of generations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Kept:
    """Of one generation; one thread at a time. Nothing is kept where gradients are wanted, nor in torch's inference mode, in
    which nobody counts what is written into a tensor."""

    def __init__(self) -> None:
        self._found: dict[object, tuple[_Given, Tensor, int]] = {}  # by module: for what, what, and its version

    def __call__(self, module: object, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """What the module gives: computed, unless it is known."""
        able = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if not able or kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].is_inference():
            return forward(*args, **kwargs)
        known = self._found.get(module)
        if known is not None:
            given, found, version = known
            if found._version == version and given.is_same(args[0]):
                return found
        found = forward(*args)
        if isinstance(found, Tensor) and not found.is_inference():
            self._found[module] = self._given(args[0]), found, found._version
        return found

    def _given(self, value: Tensor) -> _Given:
        """Modules that are given the same tensor share what is known of it."""
        return next((given for given, _, _ in self._found.values() if given.is_same(value)), None) or _Given(value)


class _Given:
    """A tensor as it was given, and the last one that was found to hold the same numbers: a step's layers share one."""

    def __init__(self, value: Tensor) -> None:
        self._first = self._latest = (value, value._version)

    def is_same(self, value: Tensor) -> bool:
        first, version = self._first
        if first._version != version:
            return False  # written into since, so nobody knows what it was
        latest, version = self._latest
        if value is latest and value._version == version:
            return True
        alike = first.dtype == value.dtype and first.device == value.device and torch.equal(first, value)
        if alike:
            self._latest = (value, value._version)
        return alike
