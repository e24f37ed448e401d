"""The last observations of a robot, as the batch of one that a policy takes, and features of their frames. Knows nothing of
policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache_runtime.checks import Array, read_array
from blockcache_runtime.errors import ObservationError


def timeless_inputs(
    inputs: Mapping[str, tuple[int, ...]], n_obs_steps: int, outside: Collection[str]
) -> frozenset[str]:
    """Names of a policy's inputs that have no moments: their first size is another, or they are made outside of it.

    Args:
        inputs: Shapes by name, without the batch.
        n_obs_steps: How many observations the policy looks at.
        outside: Names of what is made outside of the policy.
    """
    return frozenset(name for name, shape in inputs.items() if shape[0] != n_obs_steps or name in outside)


class History:
    """Push each observation as it comes. The first of an episode is repeated as often as needed, as in rollouts."""

    def __init__(self, n_obs_steps: int, timeless: Collection[str] = ()) -> None:
        """Begin with nothing.

        Args:
            n_obs_steps: How many observations the policy looks at.
            timeless: Names of what has no moments, such as the feature of a task's words (`ExportedPolicy.timeless`): the
                newest is returned, as (1, ...).
        """
        if n_obs_steps < 1:
            raise ObservationError(f"a history holds one observation at least, got n_obs_steps={n_obs_steps}")
        self.n_obs_steps, self._timeless = n_obs_steps, timeless
        self._kept: deque[dict[str, npt.NDArray[Any]]] = deque(maxlen=n_obs_steps)

    def push(self, observation: Any) -> Any:
        """Keep a copy of this moment, and return the last `n_obs_steps` moments as float32, or a camera's bytes as bytes.

        One that is refused (not finite, another shape or other names than before, a camera's bytes among fractions) leaves
        the history as it was.

        Args:
            observation: An array (...), or arrays by name. Returned in the same form, each as (1, n_obs_steps, ...); what
                is timeless as (1, ...).
        """
        bare = not isinstance(observation, Mapping)
        given: Mapping[str, Any] = {"obs": observation} if bare else observation
        now = {name: _copied(value, f"the observation {name!r}") for name, value in given.items()}
        if self._kept and (expected := forms(self._kept[-1])) != forms(now):
            raise ObservationError(
                f"the observation has the shapes {forms(now)}, expected {expected} as before; call reset() where "
                "another episode begins"
            )
        self._kept.extend([now] * (1 if self._kept else self.n_obs_steps))
        batch = {
            name: value[None] if name in self._timeless else np.stack([moment[name] for moment in self._kept])[None]
            for name, value in now.items()
        }
        return batch["obs"] if bare else batch

    def reset(self) -> None:
        """Forget everything: another episode begins."""
        self._kept.clear()


class FeatureMemory:
    """Features of the frames of the last call, so that no frame is encoded twice.

    Features of a moment depend on its frames alone, and frames are recognised by their every number; so the action is the
    same to the last bit as if all had been encoded anew. Several threads may ask at once; each call's are stored as a whole.
    """

    def __init__(self, features: int) -> None:
        """Begin with nothing.

        Args:
            features: How many numbers the frames of one moment become.
        """
        self._size = features
        self._moments: tuple[tuple[dict[str, Array], Array], ...] = ()  # frames of one moment, and their features

    def recall(self, frames: Mapping[str, Array]) -> Array:
        """Features (recalled, batch, features) of the first moments, as many in a row as were in the last call.

        Args:
            frames: By camera, (moments, batch, channels, height, width).
        """
        first, moments = next(iter(frames.values())), self._moments
        found: list[Array] = []
        for moment in range(len(first)):
            for stored, features in moments:
                if all(np.array_equal(stored[name], array[moment]) for name, array in frames.items()):
                    found.append(features)
                    break
            else:
                break
        return np.stack(found) if found else np.zeros((0, first.shape[1], self._size), dtype=np.float32)

    def store(self, frames: Mapping[str, Array], features: Array) -> None:
        """Remember a call: its frames, which are copied, and the features of all of its moments."""
        self._moments = tuple(
            ({name: array[moment].copy() for name, array in frames.items()}, one) for moment, one in enumerate(features)
        )


def _copied(value: Any, what: str) -> npt.NDArray[Any]:
    array = read_array(value, what)
    return np.array(value) if getattr(value, "dtype", None) == np.uint8 else array.copy()


def forms(arrays: Mapping[str, npt.NDArray[Any]], before: int = 0) -> dict[str, tuple[Any, ...]]:
    """Shapes by name, and of what may be frames also whether they are bytes or fractions, whose scales differ.

    Args:
        arrays: By name.
        before: Axes before those of one moment, of which frames have three.
    """

    def kind(array: npt.NDArray[Any]) -> tuple[str, ...]:
        return () if array.ndim < before + 3 else ("uint8" if array.dtype == np.uint8 else "float",)

    return {name: (*array.shape, *kind(array)) for name, array in arrays.items()}
