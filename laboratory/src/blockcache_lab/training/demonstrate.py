"""Demonstrations by a simulator's own expert, written as the .npz that training reads. Never from test seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from blockcache.files import PathLike, write_arrays
from blockcache.observations import joined, stacked
from blockcache.progress import progress_bar
from blockcache.tasks import Task, expert_factory, make_task, task_spec
from blockcache.tasks.base import Array
from blockcache_lab.training.data import TrainingError

LINGER = 10  # steps that are kept after success: a policy shall learn to stay there
PATIENCE = 50  # failures in a row


def demonstrate(
    task: str,
    out: PathLike,
    episodes: int,
    *,
    noise: float = 0.0,
    every: int = 1,
    lasting: int = 1,
    first_seed: int = 0,
    progress: bool = True,
) -> int:
    """Write successful demonstrations of a task's own expert; return how many episodes failed and were left out.

    With noise the expert is seen on its way back from mistakes too; the actions that are kept are always its own. Noise in
    every step shows up in the next actions of the expert, who corrects it, and a policy learns these corrections as if they
    were part of the way; with noise in single steps what follows is a clean way back. One that lasts is a push: it takes the
    hand to places from which an expert without phases shows the way as well.

    Args:
        task: By its name.
        out: The .npz file to write.
        episodes: Successful ones.
        noise: Standard deviation of what is added to the actions that are executed, in the task's units.
        every: Noise begins in one of so many steps, drawn at random.
        lasting: For so many steps it stays the same.
        first_seed: First environment seed; test seeds are refused.
        progress: Whether to show a bar.
    """
    if episodes < 2 or not 0 <= noise < 1 or every < 1 or lasting < 1:
        raise TrainingError(
            "demonstrations need at least 2 episodes and noise from 0 to below 1, in one of 1 or more steps, for 1 or more; "
            f"got {episodes=}, {noise=}, {every=} and {lasting=}"
        )
    first_test = task_spec(task).first_test_seed
    kept: list[tuple[Any, Array]] = []
    seeds: list[int] = []  # of the episodes that are kept
    in_vain = 0  # failures since the last success
    simulator, seed = make_task(task), first_seed
    try:
        with progress_bar(total=episodes, disable=not progress, unit="episode", desc=f"demonstrate {task}") as bar:
            while len(kept) < episodes:
                if not 0 <= seed < first_test:
                    raise TrainingError(
                        f"demonstrations begin at seed 0 and end before the test seeds, got seed {seed}"
                    )
                found = _episode(simulator, task, seed, noise, every, lasting)
                seed += 1
                in_vain = 0 if found is not None else in_vain + 1
                if in_vain == PATIENCE:
                    raise TrainingError(
                        f"the expert failed {PATIENCE} times in a row; nothing was written, take less noise"
                    )
                if found is not None:
                    kept.append(found)
                    seeds.append(seed - 1)
                    bar.update()
                bar.set_postfix(failed=seed - first_seed - len(kept), refresh=False)
    finally:
        simulator.close()
    seen = joined([obs for obs, _ in kept])
    write_arrays(
        out,
        **(seen if isinstance(seen, Mapping) else {"obs": seen}),
        action=np.concatenate([action for _, action in kept]),
        episode_ends=np.cumsum([len(action) for _, action in kept]),
        seeds=np.array(seeds),
        task=np.array(task),
    )
    return seed - first_seed - episodes


def _episode(simulator: Task, task: str, seed: int, noise: float, every: int, lasting: int) -> tuple[Any, Array] | None:
    """What was seen, (steps, O) or such arrays by name, and what the expert wanted, (steps, A); None if it failed."""
    seen, wanted, random = [simulator.reset(seed)], list[Array](), np.random.default_rng(seed)
    act, left = expert_factory(task)(simulator), LINGER
    push, remaining = np.zeros(0), 0
    while left and len(wanted) < simulator.spec.max_steps:
        wanted.append(act(seen[-1]))
        disturbed = every == 1 or random.random() < 1 / every
        drawn = random.standard_normal(wanted[-1].shape)
        if disturbed:
            push, remaining = noise * drawn, lasting
        simulator.step(wanted[-1] + push if remaining else wanted[-1])
        remaining = max(0, remaining - 1)
        seen.append(simulator.observe())
        left -= simulator.success
    if not simulator.success:
        return None
    return stacked(seen[:-1]), np.stack(wanted).astype(np.float32)
