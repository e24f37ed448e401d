"""Rollouts on a toy simulator whose numbers can be followed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import Rollout, TaskSpec, rollout
from listener import Listener

SPEC = TaskSpec("toy", obs_dim=2, action_dim=1, max_steps=7, success="total >= 10", extra="toy")


class Toy:
    """Adds up its actions. Observation: (seed, number of steps). It fails where `fails` says (seed -> step)."""

    def __init__(self, fails: dict[int, int], log: list[Toy]) -> None:
        self.spec, self.fails, self.closed = SPEC, fails, False
        log.append(self)

    def reset(self, seed: int) -> Any:
        self.seed, self.steps, self.total = seed, 0, 0.0
        self._fail()
        return self.observe()

    def observe(self) -> Any:
        return np.array([self.seed, self.steps], dtype=np.float32)

    def step(self, action: Any) -> None:
        self.steps += 1
        self._fail()
        self.total += float(action[0])

    def _fail(self) -> None:
        if self.fails.get(self.seed) == self.steps:
            raise RuntimeError("the block fell through the table")

    @property
    def score(self) -> float:
        return min(1.0, self.total / 10)

    @property
    def success(self) -> bool:
        return self.total >= 10

    @property
    def done(self) -> bool:
        return self.success or self.steps >= SPEC.max_steps

    def render(self) -> Any:
        return np.zeros((1, 1, 3), dtype=np.uint8)

    def close(self) -> None:
        self.closed = True


class Recorder:
    """A policy that acts with its seed, (seed, seed, seed), and keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.chunks: list[int] = []

    def __call__(self, obs: Any, chunk: int) -> Any:
        self.seen.append(obs.copy())
        self.chunks.append(chunk)
        return np.repeat(obs[:, -1:, :1], 3, axis=1)  # (B, 3, 1)


def run(act: Any, seeds: list[int], fails: dict[int, int] | None = None) -> tuple[tuple[Rollout, ...], list[Toy]]:
    log: list[Toy] = []
    try:
        records = rollout(lambda: Toy(fails or {}, log), act, seeds, n_obs_steps=2, n_action_steps=3)
    finally:
        assert all(toy.closed for toy in log)
    return records, log


def row(record: Rollout) -> tuple[Any, ...]:
    return (record.seed, record.score, record.success, record.steps, record.error, record.actions.ravel().tolist())


def test_scores_steps_and_actions_are_those_of_each_episode() -> None:
    records, _ = run(Recorder(), [1, 4])
    # seed 1 adds 1 for 7 steps; seed 4 has 12 after 3 steps and is over
    assert row(records[0]) == (1, 0.7, False, 7, None, [1.0] * 7)
    assert row(records[1]) == (4, 1.0, True, 3, None, [4.0] * 3)


def test_observation_history_starts_repeated_and_then_moves_on() -> None:
    policy = Recorder()
    run(policy, [1, 4])
    assert policy.chunks == [0, 1, 2]
    assert [obs.shape for obs in policy.seen] == [(2, 2, 2)] * 3
    assert policy.seen[0].dtype == np.float32
    assert policy.seen[0][0].tolist() == [[1, 0], [1, 0]]
    assert policy.seen[1][0].tolist() == [[1, 2], [1, 3]]
    assert policy.seen[2][0].tolist() == [[1, 5], [1, 6]]


def test_an_episode_that_is_over_stays_as_padding_and_is_not_stepped() -> None:
    policy = Recorder()
    _, toys = run(policy, [1, 4])
    assert policy.seen[2][1].tolist() == [[4, 2], [4, 3]]
    assert toys[1].steps == 3


def test_a_policy_is_not_asked_once_all_episodes_are_over() -> None:
    policy = Recorder()
    run(policy, [4, 5])
    assert policy.chunks == [0]


@pytest.mark.parametrize(("step", "done"), [(0, 0), (1, 0), (5, 4)])
def test_a_simulator_that_raises_is_recorded_and_the_others_go_on(step: int, done: int) -> None:
    records, _ = run(Recorder(), [1, 2, 3], fails={2: step})
    alone, _ = run(Recorder(), [1, 2, 3])
    assert row(records[1])[:4] == (2, None, None, done)
    assert records[1].error == "RuntimeError: the block fell through the table"
    assert records[1].actions.shape == (done, 1)
    assert [row(records[i]) for i in (0, 2)] == [row(alone[i]) for i in (0, 2)]


def test_all_simulators_may_fail() -> None:
    records, _ = run(Recorder(), [1, 2], fails={1: 0, 2: 0})
    assert [record.error is None for record in records] == [False, False]


def test_an_action_that_is_not_finite_fails_that_episode_only() -> None:
    def act(obs: Any, chunk: int) -> Any:
        actions = np.ones((2, 3, 1))
        actions[0, 1] = np.nan
        return actions

    records, _ = run(act, [1, 2])
    assert records[0].error is not None
    assert "not finite at step 1" in records[0].error
    assert (records[0].score, records[0].steps, records[1].steps, records[1].error) == (None, 1, 7, None)


def test_a_simulator_that_blows_up_fails_alone_before_the_policy_sees_it() -> None:
    class Exploding(Toy):
        def observe(self) -> Any:
            return super().observe() * (np.nan if (self.seed, self.steps) == (2, 4) else 1)

    policy = Recorder()
    log: list[Toy] = []
    good, bad = rollout(lambda: Exploding({}, log), policy, [1, 2], n_obs_steps=2, n_action_steps=3)
    assert bad.error == "TaskError: the simulator's observation holds NaN or infinity"
    assert (good.score, good.steps) == (0.7, 7)
    assert all(np.isfinite(obs).all() for obs in policy.seen)


def test_errors_of_the_policy_and_interrupts_end_the_call_and_close_the_simulators() -> None:
    def broken(obs: Any, chunk: int) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(broken, [1])

    class Interrupted(Toy):
        def step(self, action: Any) -> None:
            raise KeyboardInterrupt

    log: list[Toy] = []
    with pytest.raises(KeyboardInterrupt):
        rollout(lambda: Interrupted({}, log), Recorder(), [1, 2], n_obs_steps=2, n_action_steps=3)
    assert [toy.closed for toy in log] == [True, True]


def test_a_simulator_that_breaks_elsewhere_fails_on_its_own_too() -> None:
    class Broken(Toy):
        """Seed 1 cannot say whether it is over, seed 2 how well it went, seed 3 cannot be closed."""

        @property
        def done(self) -> bool:
            if self.seed == 1 and self.steps == 2:
                raise RuntimeError("over?")
            return super().done

        @property
        def score(self) -> float:
            if self.seed == 2:
                raise RuntimeError("how well?")
            return super().score

        def close(self) -> None:
            super().close()
            if self.seed == 3:
                raise RuntimeError("no way out")

    log: list[Toy] = []
    records = rollout(lambda: Broken({}, log), Recorder(), [1, 2, 3, 4], n_obs_steps=2, n_action_steps=3)
    assert [record.error for record in records] == ["RuntimeError: over?", "RuntimeError: how well?", None, None]
    assert [record.score for record in records] == [None, None, 1.0, 1.0]
    assert all(toy.closed for toy in log)


def test_refused() -> None:
    with pytest.raises(TaskError, match="at least one seed"):
        run(Recorder(), [])
    with pytest.raises(TaskError, match=r"shape \(1, 3, 2\).*need \(1, 3, 1\)"):
        run(lambda obs, chunk: np.zeros((1, 3, 2)), [1])
    with pytest.raises(TaskError, match="at least 1 step"):
        rollout(lambda: Toy({}, []), Recorder(), [1], n_obs_steps=0, n_action_steps=3)


def test_on_step_sees_the_start_and_every_step() -> None:
    frames: list[list[int]] = []
    log: list[Toy] = []
    rollout(
        lambda: Toy({}, log),
        Recorder(),
        [4, 5],
        n_obs_steps=2,
        n_action_steps=3,
        on_step=lambda tasks: frames.append([task.steps for task in tasks]),  # type: ignore[attr-defined]
    )
    assert frames == [[0, 0], [1, 1], [2, 2], [3, 2]]


def test_a_watcher_hears_of_its_own_episode_until_it_is_over() -> None:
    listener = Listener()
    rollout(lambda: Toy({}, []), Recorder(), [4, 5], n_obs_steps=2, n_action_steps=3, watchers={4: listener})
    assert listener.seen == [(0, [4, 0]), (1, [4, 1]), (2, [4, 2])]
    assert listener.plans == [(0, 0, [4.0, 4.0, 4.0], {})]
    assert listener.done == [(0, 4.0, False), (1, 4.0, False), (2, 4.0, False)]


def test_records_cannot_be_changed() -> None:
    records, _ = run(Recorder(), [1])
    with pytest.raises(AttributeError):
        records[0].score = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError):
        records[0].actions[0] = 0
