"""Demonstrations: read them, hold some episodes out, cut the rest into windows. Knows nothing of models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache.errors import BlockcacheError, FileError, short, shortened
from blockcache.files import PathLike, parse_arrays, read_bytes, reading
from blockcache.observations import batch_size
from blockcache.tasks import TaskSpec

Array: TypeAlias = npt.NDArray[Any]

_HELD_OUT = 0.02  # share of the episodes that are kept for validation, at least one
_SPLIT_SEED = 42  # the same episodes are held out whatever the seed of the run


class TrainingError(BlockcacheError):
    """A training run that cannot be started or continued as asked."""


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """Recorded episodes one after the other: obs (N, O) or arrays by name, action (N, A), and where each episode ends.

    Frames are (N, channels, height, width) uint8.
    """

    obs: Any
    action: Array
    episode_ends: Array
    sha256: str

    @property
    def episodes(self) -> list[tuple[int, int]]:
        """First step of each episode, and the one after its last."""
        starts = np.concatenate(([0], self.episode_ends[:-1]))
        return list(zip(starts.tolist(), self.episode_ends.tolist(), strict=True))


def read_demonstrations(spec: TaskSpec, path: PathLike) -> Demonstrations:
    """Read a task's .npz file; one that does not fit the task is refused.

    Args:
        spec: The task's facts.
        path: The file. One that names no task, as public sets, is taken for this one's if its arrays fit.
    """
    data = read_bytes(path, "demonstrations")
    arrays = parse_arrays(data, "demonstrations", path)
    if "task" in arrays:
        _check_task(spec, arrays, path)
    with reading("demonstrations", path):
        try:
            obs = _observed(spec, arrays, path)
            action = _numbers("action", arrays["action"], (spec.action_dim,), spec, path)
            ends = arrays["episode_ends"]
        except KeyError as error:
            raise FileError(
                f"the demonstrations {path} lack the array {error}; found {short(sorted(arrays))}"
            ) from error
    steps = batch_size(obs)
    sound = ends.ndim == 1 and ends.dtype.kind in "iu" and len(ends) > 0
    if not (sound and ends[0] > 0 and (ends[1:] > ends[:-1]).all() and ends[-1] == steps == len(action)):
        raise TrainingError(
            f"episode_ends in {path} must be whole numbers that rise to the number of steps, "
            f"which is {steps} in the observations and {len(action)} in the actions"
        )
    return Demonstrations(obs, action, ends, hashlib.sha256(data).hexdigest())


def _check_task(spec: TaskSpec, arrays: Mapping[str, Array], path: PathLike) -> None:
    """Refuse demonstrations of another task, or of another version of it; a file that names none is of version 1."""
    if str(arrays["task"]) != spec.name:
        raise TrainingError(f"the demonstrations {path} are of task {str(arrays['task'])!r}, not of {spec.name!r}")
    version = str(arrays.get("task_version", 1))
    if version != str(spec.version):
        raise TrainingError(
            f"the demonstrations {path} are of version {shortened(version, 40)} of task {spec.name!r}, expected "
            f"{spec.version}: what is observed, or what an action means, is not the same; "
            f"make them again with 'blockcache policy demonstrate {spec.name}'"
        )


def _observed(spec: TaskSpec, arrays: Mapping[str, Array], path: PathLike) -> Any:
    """What the task shows in each step: (N, O), or arrays by name."""
    found = _OBSERVATIONS.get(spec.name, _plain_observation)(spec, arrays)
    if spec.inputs is None:
        return _numbers("observation", found, (spec.obs_dim,), spec, path)
    return {
        name: (_frames if name in spec.cameras else _numbers)(name, found[name], tuple(shape), spec, path)
        for name, shape in spec.inputs.items()
    }


def _frames(name: str, array: Array, shape: tuple[int, ...], spec: TaskSpec, path: PathLike) -> Array:
    if array.dtype != np.uint8 or array.shape[1:] != shape or not len(array):
        raise _misfit(f"frames {name!r}", array, shape, spec, path, "uint8")
    return array


def _numbers(name: str, array: Array, shape: tuple[int, ...], spec: TaskSpec, path: PathLike) -> Array:
    """(steps, *shape) in float32."""
    if array.ndim == 0 or array.shape[1:] != shape or array.dtype.kind not in "fiub":
        raise _misfit(f"{name}s", array, shape, spec, path, "numbers")
    with np.errstate(over="ignore"):
        rows = array.astype(np.float32)
    if not np.isfinite(rows).all():
        raise TrainingError(f"the {name}s in {path} hold NaN or infinity; remove those episodes")
    return rows


def _misfit(
    what: str, array: Array, shape: tuple[int, ...], spec: TaskSpec, path: PathLike, wanted: str
) -> TrainingError:
    return TrainingError(
        f"the {what} in {path} have shape {array.shape} of {array.dtype}, task {spec.name!r} needs (steps, "
        f"{', '.join(map(str, shape))}) of {wanted}"
    )


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


def _plain_observation(spec: TaskSpec, arrays: Mapping[str, Array]) -> Any:
    return arrays["obs"] if spec.inputs is None else {name: arrays[name] for name in spec.inputs}


def _pusht_observation(spec: TaskSpec, arrays: Mapping[str, Array]) -> Array:
    """Nine keypoints of the block, then the agent: 18 + 2 numbers."""
    keypoints, state = arrays["keypoint"], arrays["state"]
    return np.concatenate((keypoints.reshape(len(keypoints), -1), state[:, :2]), axis=1)


def _pusht_frames(spec: TaskSpec, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Frames are drawn from the states, as the public ones were: 25,650 of them take a minute."""
    from blockcache_lab.tasks.pusht_image import frames_of

    states = _numbers("state", arrays["state"], (5,), spec, "the demonstrations")
    return {"image": frames_of(states, spec), "agent_pos": states[:, :2]}


# Tasks whose files do not hold the observation as it is, under the name "obs" or by the names of its inputs.
_OBSERVATIONS: dict[str, Callable[[TaskSpec, Mapping[str, Array]], Any]] = {
    "pusht": _pusht_observation,
    "pusht-image": _pusht_frames,
}
