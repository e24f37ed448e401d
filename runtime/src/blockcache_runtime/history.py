"""The last observations of a robot, as the batch of one that a policy takes. Knows nothing of policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache_runtime.checks import read_array
from blockcache_runtime.errors import ObservationError


class History:
    """Push each observation as it comes. The first of an episode is repeated as often as needed, as in rollouts."""

    def __init__(self, n_obs_steps: int) -> None:
        """Begin with nothing.

        Args:
            n_obs_steps: How many observations the policy looks at.
        """
        if n_obs_steps < 1:
            raise ObservationError(f"a history holds one observation at least, got n_obs_steps={n_obs_steps}")
        self.n_obs_steps = n_obs_steps
        self._kept: deque[dict[str, npt.NDArray[Any]]] = deque(maxlen=n_obs_steps)

    def push(self, observation: Any) -> Any:
        """Keep a copy of this moment, and return the last `n_obs_steps` moments as float32, or a camera's bytes as bytes.

        One that is refused (not finite, another shape or other names than before) leaves the history as it was.

        Args:
            observation: An array (...), or arrays by name. Returned in the same form, each as (1, n_obs_steps, ...).
        """
        bare = not isinstance(observation, Mapping)
        given: Mapping[str, Any] = {"obs": observation} if bare else observation
        now = {name: _copied(value, f"the observation {name!r}") for name, value in given.items()}
        if self._kept and (expected := _shapes(self._kept[-1])) != _shapes(now):
            raise ObservationError(
                f"the observation has the shapes {_shapes(now)}, expected {expected} as before; call reset() where "
                "another episode begins"
            )
        self._kept.extend([now] * (1 if self._kept else self.n_obs_steps))
        batch = {name: np.stack([moment[name] for moment in self._kept])[None] for name in now}
        return batch["obs"] if bare else batch

    def reset(self) -> None:
        """Forget everything: another episode begins."""
        self._kept.clear()


def _copied(value: Any, what: str) -> npt.NDArray[Any]:
    array = read_array(value, what)
    return np.array(value) if getattr(value, "dtype", None) == np.uint8 else array.copy()


def _shapes(moment: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in moment.items()}
