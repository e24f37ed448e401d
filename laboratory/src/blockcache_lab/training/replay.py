"""Demonstrations played again in the simulator: whether it is theirs, by how they end and by what is seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blockcache.files import PathLike, parse_arrays, read_bytes
from blockcache.progress import progress_bar
from blockcache.tasks import make_task, task_spec
from blockcache_lab.training.data import Array, TrainingError, read_demonstrations

BEGINS_ALIKE = 1e-3
"""Most that a first observation may be away from the recorded one, in the task's units: beyond it, it is another scene."""


@dataclass(frozen=True)
class Replay:
    """How episodes went when they were played again.

    as_recorded: for each, whether it ended in success just if the recorded one did.
    residuals: for each, the largest difference between what was observed and what was recorded.
    medians: for each, the middle one of the largest difference in each step.
    """

    as_recorded: tuple[bool, ...]
    residuals: tuple[float, ...]
    medians: tuple[float, ...]


def replay(
    task: str, data: PathLike, *, first_seed: int = 0, episodes: int | None = None, progress: bool = True
) -> Replay:
    """Play the recorded actions again, each episode from its seed, and compare.

    Args:
        task: The task's name; its observation must be one row of numbers.
        data: The demonstrations. Arrays beside those that training needs: `seeds`, one for each episode, and `final_reward`,
            above 0.5 where the episode succeeded; without it all did.
        first_seed: The first episode's seed, where the file holds none; the others follow it.
        episodes: How many, from the first; None is all.
        progress: Whether a bar is shown.
    """
    spec = task_spec(task)
    if spec.inputs is not None:
        raise TrainingError(f"demonstrations of {task!r} cannot be compared: a replay compares one row of numbers")
    demos = read_demonstrations(spec, data)
    arrays = parse_arrays(read_bytes(data, "demonstrations"), "demonstrations", data)
    count = len(demos.episodes)
    seeds = _one_each("seeds", arrays.get("seeds", first_seed + np.arange(count)), count)
    succeeded = _one_each("final_reward", arrays.get("final_reward", np.ones(count)), count) > 0.5
    ends, residuals, medians = list[bool](), list[float](), list[float]()
    simulator = make_task(task)
    try:
        chosen = demos.episodes[:episodes]
        for index, (start, stop) in enumerate(progress_bar(chosen, disable=not progress, unit="episode")):
            seen = [simulator.reset(int(seeds[index]))]
            if (away := float(np.abs(seen[0] - demos.obs[start]).max())) > BEGINS_ALIKE:
                raise TrainingError(
                    f"episode {index} does not begin as task {task!r} does with seed {seeds[index]}: what is observed "
                    f"differs by {away:.3g}; the file is of another task or version, or its seeds are others"
                )
            for action in demos.action[start:stop]:
                simulator.step(action)
                seen.append(simulator.observe())
            apart = np.abs(np.stack(seen[:-1]) - demos.obs[start:stop]).max(axis=1)
            ends.append(bool(simulator.success == succeeded[index]))
            residuals.append(float(apart.max()))
            medians.append(float(np.median(apart)))
    finally:
        simulator.close()
    return Replay(tuple(ends), tuple(residuals), tuple(medians))


def _one_each(name: str, array: Array, episodes: int) -> Array:
    if array.shape != (episodes,) or array.dtype.kind not in "iuf":
        raise TrainingError(
            f"{name} of demonstrations is one number for each of the {episodes} episodes, got shape {array.shape} of "
            f"{array.dtype}"
        )
    return array
