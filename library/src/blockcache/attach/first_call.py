"""What a policy hands to its denoiser: its own code runs until the denoiser is called, and is stopped there.

So its normaliser, its encoder and whatever else it does with an observation stay its own. Knows nothing of programs,
schedules and samplers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from blockcache.attach.patching import Patches
from blockcache.models.port import Port
from blockcache.observations.tensors import check_finite

_stopping: ContextVar[object | None] = ContextVar("blockcache_first_call", default=None)


class _DenoiserCalledError(BaseException):  # no `Exception`: the policy's own code must not catch it
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.given = args, kwargs


class FirstDenoiserCall:
    """`first_call(obs)` -> the arguments of the denoiser's first call for that observation.

    Several threads may call it, one at a time: the policy's code is not known to bear more. Calls of the denoiser from
    elsewhere run as they are.

    Args:
        port: The policy.
        own: Its entry as it was before anything replaced it.
        patches: They take the replacement of the denoiser's forward, and take it off again.
    """

    def __init__(self, port: Port, own: Callable[[Any], Any], patches: Patches) -> None:
        self._port, self._own, self._lock = port, own, threading.RLock()
        patches.replace(port.adapter.denoiser, "forward", self._stop)

    def _stop(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _stopping.get() is self:
                raise _DenoiserCalledError(args, kwargs)
            return forward(*args, **kwargs)

        return call

    def __call__(self, obs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Positional and named arguments; None if the policy answers without its denoiser."""
        check_finite(obs)
        with self._lock:
            token = _stopping.set(self)
            try:
                self._own(obs)
            except _DenoiserCalledError as called:
                return called.given
            except Exception as error:  # foreign code may raise anything
                explained = self._port.explain(error, obs)
                if explained is None:
                    raise
                raise explained from error
            finally:
                _stopping.reset(token)
        return None
