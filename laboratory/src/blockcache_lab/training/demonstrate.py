"""Demonstrations by a simulator's own expert, written as the .npz that training reads. Never from test seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from blockcache.errors import in_one_line
from blockcache.files import PathLike, write_arrays
from blockcache.observations import joined, stacked
from blockcache.progress import progress_bar
from blockcache.tasks import Task, TaskSpec, expert_factory, make_task
from blockcache.tasks.base import Array
from blockcache.tasks.rollout import checked_observation
from blockcache_lab.training.data import TrainingError

LINGER = 10  # steps that are kept after success: a policy shall learn to stay there
PATIENCE = 50  # failures of the expert since it last succeeded
BROKEN = 20  # episodes since then that raised an error

# what was seen, (steps, O) or such arrays by name; the expert's actions, (steps, A)
Shown: TypeAlias = tuple[Any, Array]


@dataclass(frozen=True)
class Demonstrated:
    """What became of the episodes.

    kept: In so many the expert succeeded; they are in the file.
    failed: In so many it did not.
    errors: What the simulator or the expert raised in others -> in how many.
    """

    kept: int
    failed: int
    errors: Mapping[str, int]


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
) -> Demonstrated:
    """Write successful demonstrations of a task's own expert; return how many they are, and what became of other episodes.

    With noise the expert is seen on its way back from mistakes too; the actions that are kept are always its own. Noise in
    every step shows up in the next actions of the expert, who corrects it, and a policy learns these corrections as if they
    were part of the way; with noise in single steps what follows is a clean way back. One that lasts is a push: it takes the
    hand to places from which an expert without phases shows the way as well.

    An episode that raises an error is left out and counted, and a fresh simulator goes on with the next seed. Where success
    no longer comes, the call ends with an error, once what was kept has been written.

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
    simulator = make_task(task)
    kept: dict[int, Shown] = {}  # by seed
    others: list[str | None] = []  # of each other episode the error, None where the expert just failed
    in_vain: list[str | None] = []  # those of them since the last success
    hopeless = None
    with (
        closing(_played(simulator, first_seed, noise, every, lasting)) as played,
        progress_bar(total=episodes, disable=not progress, unit="episode", desc=f"demonstrate {task}") as bar,
    ):
        while len(kept) < episodes and hopeless is None:
            seed, found, error = next(played)
            if found is not None:
                kept[seed], in_vain = found, []
                bar.update()
            else:
                others.append(error)
                in_vain.append(error)
            hopeless = _hopeless(in_vain)
            failed = others.count(None)
            bar.set_postfix(failed=failed, raised=len(others) - failed, refresh=False)
    if len(kept) > 1:
        _write(out, simulator.spec, kept)
    if hopeless is not None:
        written = f"the {len(kept)} episodes before are in {out}" if len(kept) > 1 else "nothing was written"
        raise TrainingError(f"{hopeless}; {written}")
    return Demonstrated(len(kept), failed, Counter(error for error in others if error is not None))


def _hopeless(in_vain: Sequence[str | None]) -> str | None:
    """Why it is of no use to go on after these episodes, and what to do; None if it may be."""
    raised = [error for error in in_vain if error is not None]
    if len(raised) == BROKEN:
        return (
            f"{BROKEN} episodes raised an error and none succeeded between them; the last was {raised[-1]}; mend that"
        )
    if len(in_vain) - len(raised) == PATIENCE:
        return f"the expert failed {PATIENCE} times in a row; take less noise"
    return None


def _write(out: PathLike, spec: TaskSpec, kept: Mapping[int, Shown]) -> None:
    seen = joined([obs for obs, _ in kept.values()])
    write_arrays(
        out,
        **(seen if isinstance(seen, Mapping) else {"obs": seen}),
        action=np.concatenate([action for _, action in kept.values()]),
        episode_ends=np.cumsum([len(action) for _, action in kept.values()]),
        seeds=np.array(list(kept)),
        task=np.array(spec.name),
        **({} if spec.version == 1 else {"task_version": np.array(spec.version)}),
    )


def _played(
    first: Task, first_seed: int, noise: float, every: int, lasting: int
) -> Generator[tuple[int, Shown | None, str | None], None, None]:
    """Seed by seed what is to be kept of the episode, or None, and the error if there was one. Test seeds are refused."""
    task, first_test = first.spec.name, first.spec.first_test_seed
    simulator: Task | None = first
    try:
        for seed in count(first_seed):
            if not 0 <= seed < first_test:
                raise TrainingError(f"demonstrations begin at seed 0 and end before the test seeds, got seed {seed}")
            found, error = None, None
            try:
                simulator = make_task(task) if simulator is None else simulator
                found = _episode(simulator, task, seed, noise, every, lasting)
            except Exception as raised:  # whatever a simulator may raise; as in rollouts it is this episode's alone
                error = in_one_line(raised)
                _close(simulator)
                simulator = None
            yield seed, found, error
    finally:
        _close(simulator)


def _close(simulator: Task | None) -> None:
    if simulator is not None:
        with suppress(Exception):  # an error while closing does not cost the demonstrations
            simulator.close()


def _episode(simulator: Task, task: str, seed: int, noise: float, every: int, lasting: int) -> Shown | None:
    """What was seen, and what the expert wanted; None if it failed."""
    spec = simulator.spec
    seen, wanted = [checked_observation(simulator.reset(seed), spec)], list[Array]()
    random = np.random.default_rng(seed)
    act, left = expert_factory(task)(simulator), LINGER
    push, remaining = np.zeros(0), 0
    while left and len(wanted) < spec.max_steps:
        wanted.append(act(seen[-1]))
        if not np.isfinite(wanted[-1]).all():
            raise TrainingError(f"the expert's action is not finite at step {len(wanted) - 1}")
        disturbed = every == 1 or random.random() < 1 / every
        drawn = random.standard_normal(wanted[-1].shape)
        if disturbed:
            push, remaining = noise * drawn, lasting
        simulator.step(wanted[-1] + push if remaining else wanted[-1])
        remaining = max(0, remaining - 1)
        seen.append(checked_observation(simulator.observe(), spec))
        left -= simulator.success
    if not simulator.success:
        return None
    return stacked(seen[:-1]), np.stack(wanted).astype(np.float32)
