"""Observations to calibrate, fit and check on: what a policy sees while it does its task. Never from test seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.compare.candidates import Candidate, running
from blockcache.errors import TaskError
from blockcache.files import PathLike
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, joined, pick, save_observations
from blockcache.progress import progress_bar
from blockcache.tasks import make_task, rollout, task_spec


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a policy saw when it was asked for a chunk, and when that was: two chunks that follow one another are known."""

    obs: Any  # (N, n_obs_steps, obs_dim), or such arrays by name
    moments: NDArray[np.int64] | None  # (N, 2): the seed of the episode, the chunk's place in it; None if not known

    def __len__(self) -> int:
        return batch_size(self.obs)

    def appended_to(self, obs: Any, moments: NDArray[np.int64] | None) -> Decisions:
        """These after others, which keep their places; the moments are known if they are of both."""
        known = None if moments is None or self.moments is None else np.concatenate([moments, self.moments])
        return Decisions(joined([obs, self.obs]), known)

    def save(self, path: PathLike) -> None:
        save_observations(path, self.obs, self.moments)


def observe(policy: Any, task: str, episodes: int, count: int, first_seed: int = 0) -> Decisions:
    """What a policy sees while it does its task, spread evenly over all decisions of some whole episodes, in random order.
    Decisions come in the order of time; shuffled, the first few stand for the whole task too.

    Args:
        policy: A policy object of any known family, or its port.
        task: By name.
        episodes: How many, from `first_seed` on; test seeds are refused.
        count: Observations to keep.
        first_seed: Of the episodes.
    """
    port = port_of(policy)
    last_seed, spec = first_seed + episodes - 1, task_spec(task)
    if last_seed >= spec.first_test_seed:
        raise TaskError(f"seeds {first_seed} to {last_seed} reach into the test seeds; calibrate on lower ones")
    seen: list[Any] = []

    def act(obs: Any, chunk: int) -> NDArray[np.float64]:
        seen.append(joined([obs]))  # a copy
        bar.update()
        return fast.act(obs, first_seed + chunk)

    most = math.ceil(spec.max_steps / port.n_action_steps)
    bar = progress_bar(desc=f"{episodes} episodes", total=most, unit="decision")
    with running(port, Candidate(engine="auto")) as fast, bar:  # states are all that is recorded, whatever drives
        steps: dict[str, Any] = {"n_obs_steps": port.n_obs_steps, "n_action_steps": port.n_action_steps}
        records = rollout(partial(make_task, task), act, range(first_seed, last_seed + 1), **steps)
    for record in records:
        if record.error is not None:
            raise TaskError(f"the simulator failed with seed {record.seed}: {record.error}; observe other seeds")
    # An episode that is over stays in the batch as padding; what it shows then is no decision.
    decisions = [
        (chunk * len(records) + place, (record.seed, chunk))
        for chunk in range(len(seen))
        for place, record in enumerate(records)
        if chunk * port.n_action_steps < record.steps
    ]
    if len(decisions) < count:
        raise TaskError(
            f"{episodes} episodes gave {len(decisions)} observations, {count} were asked for; use more episodes"
        )
    kept = np.linspace(0, len(decisions) - 1, count).round().astype(int)
    np.random.default_rng(first_seed).shuffle(kept)
    places, moments = zip(*(decisions[place] for place in kept), strict=True)
    return Decisions(pick(joined(seen), places), np.array(moments, dtype=np.int64))
