"""Block Pushing: the public task to the last bit, the same episode whatever was before it, an expert with four ways."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import expert_factory, make_task, rollout, task_spec
from repository import SHARED

NAME = "block-pushing"
DEMOS = SHARED / "data" / "block_pushing" / "blockpush_multimodal_regenerated_seed0-999.npz"


@pytest.fixture
def task() -> Iterator[Any]:
    pytest.importorskip("pybullet", reason='needs the extra "block-pushing" of blockcache-lab')
    made = make_task(NAME)
    yield made
    made.close()


def pushed(task: Any, seed: int, steps: int = 25) -> np.ndarray:
    """What is seen while the expert begins, which touches a block within these steps."""
    seen = [task.reset(seed)]
    act = expert_factory(NAME)(task)
    for _ in range(steps):
        task.step(act(seen[-1]))
        seen.append(task.observe())
    return np.stack(seen)


def test_same_seed_same_episode_whatever_was_before(task: Any) -> None:
    first = pushed(task, 100_000)
    other = pushed(task, 100_001)
    np.testing.assert_array_equal(pushed(task, 100_000), first)
    assert first.shape == (26, 16)
    assert first.dtype == np.float32
    blocks = first[:, [0, 1, 3, 4]]
    assert np.abs(blocks[-1] - blocks[0]).max() > 0.01  # it was touched: contacts are what a simulator remembers
    assert np.abs(first[0] - other[0]).max() > 0.01


@pytest.mark.skipif(not DEMOS.exists(), reason=f"needs the public task's episodes, {DEMOS}")
def test_recorded_episodes_are_repeated_to_the_last_bit(task: Any) -> None:
    with np.load(DEMOS) as arrays:
        obs, action, ends = arrays["obs"], arrays["action"], arrays["episode_ends"]
    for seed in (0, 79):  # 79: its first block leaves no room for the second and is drawn again
        start, stop = 0 if seed == 0 else ends[seed - 1], ends[seed]
        task.reset(seed)
        for step in range(start, stop):
            np.testing.assert_array_equal(task.observe(), obs[step])
            task.step(action[step])
        assert task.success


def test_the_expert_puts_both_blocks_into_zones_and_is_scored_on_its_way(task: Any) -> None:
    task.reset(3)
    act, scores = expert_factory(NAME)(task), [task.score]
    while not task.done:
        task.step(act(task.observe()))
        scores.append(task.score)
    assert sorted(set(scores)) == [0.0, 0.49, 1.0]
    assert scores == sorted(scores)
    assert task.success
    seen = task.observe()
    blocks, zones = seen[[[0, 1], [3, 4]]], seen[[[10, 11], [13, 14]]]
    apart = np.linalg.norm(blocks[:, None] - zones[None], axis=-1)
    assert min(apart[0, 0] + apart[1, 1], apart[0, 1] + apart[1, 0]) < 0.1


@pytest.mark.parametrize("seed", [0, 1])
def test_the_expert_finds_its_way_back_from_wherever_the_rod_was_knocked(seed: int, task: Any) -> None:
    """Every tenth step something else is done, up to the width of a block."""
    task.reset(seed)
    act, random = expert_factory(NAME)(task), np.random.default_rng(seed)
    step = 0
    while not task.done:
        task.step(random.uniform(-0.04, 0.04, 2) if step % 10 == 9 else act(task.observe()))
        step += 1
    assert task.success


def test_the_expert_depends_on_what_is_seen_alone(task: Any) -> None:
    """Asked out of turn, or twice, it says the same: nothing of the past is kept that a policy could not see."""
    seen = pushed(task, 3)
    task.reset(3)
    act = expert_factory(NAME)(task)
    forwards = [act(each) for each in seen]
    backwards = [act(each) for each in seen[::-1]]
    np.testing.assert_array_equal(forwards, backwards[::-1])
    np.testing.assert_allclose(seen[0, 8:10] + forwards[0], seen[1, 8:10], atol=1e-6)


def test_experts_show_all_four_ways(task: Any) -> None:
    """The first action goes behind a block, seen from a zone: four different ones for four draws of the same scene."""
    ways = set()
    for draw in range(4):
        task.reset(0)
        task.random = Drawn(draw)
        ways.add(tuple(np.round(expert_factory(NAME)(task)(task.observe()), 5)))
    assert len(ways) == 4


class Drawn:
    def __init__(self, value: int) -> None:
        self.value = value

    def choice(self, count: int) -> int:
        assert count == 4
        return self.value


def test_the_rod_stays_within_its_bounds(task: Any) -> None:
    task.reset(0)
    for _ in range(5):
        task.step(np.array([-1.0, -1.0]))
    np.testing.assert_allclose(task.observe()[8:10], [0.15, -0.5], atol=1e-6)


def test_useless_actions_and_moments_are_refused(task: Any) -> None:
    with pytest.raises(TaskError, match="has not begun"):
        task.step(np.zeros(2))
    with pytest.raises(TaskError, match="nothing to draw before"):
        task.render()
    task.reset(0)
    for action in (np.zeros(3), np.array([np.nan, 0])):
        with pytest.raises(TaskError, match="2 finite numbers"):
            task.step(action)
    assert task.render().shape == (384, 384, 3)


def test_a_simulator_that_raises_in_mid_episode_is_recorded_and_others_go_on(task: Any) -> None:
    class Broken(type(task)):  # type: ignore[misc]
        def reset(self, seed: int) -> Any:
            self.breaks = seed == 5
            return super().reset(seed)

        def step(self, action: Any) -> None:
            if self.breaks and self._steps == 2:
                raise RuntimeError("the arm fell off")
            super().step(action)

    short = replace(task_spec(NAME), max_steps=4)
    still = np.zeros((2, 1, 2))
    found = rollout(lambda: Broken(short), lambda obs, chunk: still, (5, 6), n_obs_steps=3, n_action_steps=1)
    assert found[0].error == "RuntimeError: the arm fell off"
    assert found[0].score is None
    assert found[1].error is None
    assert found[1].steps == 4


def test_a_missing_simulator_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pybullet", None)
    with pytest.raises(TaskError, match=r'"blockcache-lab\[block-pushing\]"'):
        make_task(NAME)
