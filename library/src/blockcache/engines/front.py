"""A policy's own code up to its denoiser, for engines that stand behind an encoder which they do not know.

The policy runs as it is until it calls its denoiser; what it would have handed over is caught there. So its normaliser, its
encoder and whatever else it does with an observation stay its own. Knows nothing of programs and schedules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from blockcache.attach.patching import Patches
from blockcache.errors import EngineError
from blockcache.models.port import Port
from blockcache.observations.tensors import check_finite

_looking: ContextVar[object | None] = ContextVar("blockcache_looking", default=None)


class _ReachedError(BaseException):
    """The denoiser was called. No `Exception`: the policy's own code must not catch it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.taken = args, kwargs


class Front:
    """`front(obs)` -> what the program of a port takes, and the start of the noise as the policy drew it.

    Several threads may call it, one at a time: the policy's code is not known to bear more.
    """

    def __init__(self, port: Port, own: Callable[..., Any], patches: Patches) -> None:
        self._port, self._own, self._lock = port, own, threading.RLock()
        patches.replace(port.adapter.denoiser, "forward", self._stopping)

    def _stopping(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _looking.get() is self:
                raise _ReachedError(args, kwargs)
            return forward(*args, **kwargs)

        return call

    def __call__(self, obs: Any) -> tuple[dict[str, Tensor], Tensor]:
        args, kwargs = self.reach(obs)
        return self._port.inputs_from_call(*args, **kwargs)

    def reach(self, obs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the denoiser is first called with."""
        check_finite(obs)
        with self._lock:
            token = _looking.set(self)
            try:
                self._own(obs)
            except _ReachedError as reached:
                return reached.taken
            except Exception as error:  # foreign code may raise anything
                explained = self._port.explain(error, obs)
                if explained is None:
                    raise
                raise explained from error
            finally:
                _looking.reset(token)
        raise EngineError(
            f'{self._port.entry} answered without its denoiser, which this engine stands for; use engine="patched"'
        )
