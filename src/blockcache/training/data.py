"""Demonstrations: read them, hold some episodes out, cut the rest into windows. Knows nothing of models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import FileError, short
from blockcache.files import PathLike, parse_arrays, read_bytes, reading
from blockcache.tasks import TaskSpec
from blockcache.training.config import TrainingError

Array: TypeAlias = npt.NDArray[Any]

_HELD_OUT = 0.02  # share of the episodes that are kept for validation, at least one
_SPLIT_SEED = 42  # the same episodes are held out whatever the seed of the run


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """Recorded episodes one behind the other: obs (N, O), action (N, A), and where each episode ends."""

    obs: Array
    action: Array
    episode_ends: Array
    sha256: str

    @property
    def episodes(self) -> list[tuple[int, int]]:
        """First step of each episode, and the one behind its last."""
        starts = np.concatenate(([0], self.episode_ends[:-1]))
        return list(zip(starts.tolist(), self.episode_ends.tolist(), strict=True))


def read_demonstrations(spec: TaskSpec, path: PathLike) -> Demonstrations:
    """Read a task's .npz file; one that does not fit the task is refused."""
    data = read_bytes(path, "demonstrations")
    arrays = parse_arrays(data, "demonstrations", path)
    with reading("demonstrations", path):
        try:
            seen = _OBSERVATIONS.get(spec.name, _plain_observation)(arrays)
            done, ends = arrays["action"], arrays["episode_ends"]
        except KeyError as error:
            raise FileError(
                f"the demonstrations {path} lack the array {error}; found {short(sorted(arrays))}"
            ) from error
    obs, action = (
        _rows(name, array, columns, spec, path)
        for name, array, columns in (("observation", seen, spec.obs_dim), ("action", done, spec.action_dim))
    )
    sound = ends.ndim == 1 and ends.dtype.kind in "iu" and len(ends) > 0
    if not (sound and ends[0] > 0 and (ends[1:] > ends[:-1]).all() and ends[-1] == len(obs) == len(action)):
        raise TrainingError(
            f"episode_ends in {path} must be whole numbers that rise to the number of steps, "
            f"which is {len(obs)} in the observations and {len(action)} in the actions"
        )
    return Demonstrations(obs, action, ends, hashlib.sha256(data).hexdigest())


def _rows(name: str, array: Array, columns: int, spec: TaskSpec, path: PathLike) -> Array:
    """(steps, columns) in float32, or a sentence saying what is wrong with them."""
    if array.ndim != 2 or array.shape[1] != columns or array.dtype.kind not in "fiu":
        found = f"shape {array.shape} of {array.dtype}"
        raise TrainingError(
            f"the {name}s in {path} have {found}, task {spec.name!r} needs (steps, {columns}) of numbers"
        )
    with np.errstate(over="ignore"):
        rows = array.astype(np.float32)
    if not np.isfinite(rows).all():
        raise TrainingError(f"the {name}s in {path} hold NaN or infinity; remove those episodes")
    return rows


def split(demos: Demonstrations) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The episodes to train on and those held out, always the same ones."""
    episodes = demos.episodes
    if len(episodes) < 2:
        raise TrainingError(f"training needs at least 2 episodes, one of them held out; got {len(episodes)}")
    count = max(1, round(_HELD_OUT * len(episodes)))
    chosen = np.random.default_rng(_SPLIT_SEED).choice(len(episodes), size=count, replace=False)
    held_out = set(chosen.tolist())
    kept = [episode for i, episode in enumerate(episodes) if i not in held_out]
    return kept, [episodes[i] for i in sorted(held_out)]


def window_indices(
    episodes: list[tuple[int, int]], horizon: int, n_obs_steps: int, n_action_steps: int
) -> npt.NDArray[np.int64]:
    """The steps of every window, (windows, horizon), padded as in Diffusion Policy.

    An episode is extended by n_obs_steps - 1 repeats of its first step and n_action_steps - 1 of its last, so
    that the robot's first observation and its last actions are seen in training. No window crosses episodes.
    """
    before, after = n_obs_steps - 1, n_action_steps - 1
    rows = [np.empty((0, horizon), dtype=np.int64)]
    for start, stop in episodes:
        first = np.arange(start - before, stop + after - horizon + 1)
        rows.append(np.clip(first[:, None] + np.arange(horizon), start, stop - 1))
    return np.concatenate(rows)


def _plain_observation(arrays: Mapping[str, Array]) -> Array:
    return arrays["obs"]


def _pusht_observation(arrays: Mapping[str, Array]) -> Array:
    """Nine keypoints of the block, then the agent: 18 + 2 numbers."""
    keypoints, state = arrays["keypoint"], arrays["state"]
    return np.concatenate((keypoints.reshape(len(keypoints), -1), state[:, :2]), axis=1)


# Tasks whose files do not hold the observation as it is, under the name "obs".
_OBSERVATIONS: dict[str, Callable[[Mapping[str, Array]], Array]] = {"pusht": _pusht_observation}
