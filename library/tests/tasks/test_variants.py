"""Tasks made harder by a suffix of their name."""

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import make_task, task_spec
from blockcache.tasks.variants import Changed, Variant, split


def test_a_suffix_changes_the_spec_and_nothing_else():
    plain, short = task_spec("pusht"), task_spec("pusht@steps=120,push=40")
    assert (short.name, short.max_steps) == ("pusht@steps=120,push=40", 120)
    assert short.describe() | {"name": "pusht", "max_steps": 300} == plain.describe()
    assert split("pusht@push=2.5") == ("pusht", Variant(push=2.5))


@pytest.mark.parametrize(
    "name",
    ["pusht@", "pusht@steps", "pusht@steps=0", "pusht@steps=1.5", "pusht@push=-1", "pusht@push=nan", "pusht@push=inf",
     "pusht@steps=9,steps=9", "pusht@steps=9,", "pusht@speed=2", "pusht@steps=301"],
)  # fmt: skip
def test_a_suffix_that_is_none_is_refused(name):
    with pytest.raises(TaskError, match="steps"):
        task_spec(name)


def test_an_unknown_task_stays_unknown():
    with pytest.raises(TaskError, match="unknown task 'pushed'"):
        make_task("pushed@steps=10")


class Recorder:
    """A task that keeps what it was asked to do."""

    spec = task_spec("pusht")
    score, success, done = 0.0, False, False

    def reset(self, seed):
        self.actions = []

    def step(self, action):
        self.actions.append(np.asarray(action))


def test_pushes_are_the_same_for_all_methods_and_the_episode_ends():
    def episode(action, seed):
        task = Changed(inner := Recorder(), Variant(steps=200, push=3.0), "pusht@steps=200,push=3")
        task.reset(seed)
        while not task.done:
            task.step(np.full(2, action))
        return np.array(inner.actions) - action

    one, other, elsewhere = episode(0.0, 7), episode(50.0, 7), episode(0.0, 8)
    np.testing.assert_allclose(one, other, atol=1e-12)
    assert len(one) == 200
    assert not np.array_equal(one, elsewhere)
    lengths = np.linalg.norm(one, axis=1)
    assert set(np.round(lengths, 9)) == {0.0, 3.0}
    assert 0.05 < (lengths > 0).mean() < 0.35


def test_a_shorter_episode_is_the_beginning_of_the_long_one():
    ends = []
    for name in ("pusht", "pusht@steps=5"):
        task = make_task(name)
        task.reset(3)
        for _ in range(5):
            task.step(np.array([200.0, 300.0]))
        ends.append(task.observe())
        assert task.done == (name != "pusht")
        task.close()
    np.testing.assert_array_equal(*ends)
