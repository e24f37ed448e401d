"""How chunks are executed: what an Execution says, what it refuses, and which candidate is taken."""

import numpy as np
import pytest

from blockcache_runtime.errors import EngineError
from blockcache_runtime.execution import AS_TRAINED, Execution, medoids


def test_the_default_is_the_policy_as_it_was_trained():
    assert AS_TRAINED.describe() == {}
    assert AS_TRAINED.keeps_noise
    assert AS_TRAINED.generations(8) == 1
    noise = np.ones((3, 1, 4, 2))
    assert AS_TRAINED.noise(noise) is noise
    AS_TRAINED.check(1)


def test_generations_count_how_often_and_how_many():
    assert Execution(replan=4).generations(8) == 2
    assert Execution(candidates=8).generations(8) == 8
    assert Execution(replan=16, candidates=2).generations(8) == 1


def test_temperature_scales_all_noise():
    assert np.array_equal(Execution(temperature=0.5).noise(np.full((3, 1, 4, 2), 2.0)), np.ones((3, 1, 4, 2)))
    assert not Execution(temperature=0.5).keeps_noise
    assert Execution(replan=2).keeps_noise
    assert Execution(4, 0.5, 3).describe() == {"replan": 4, "temperature": 0.5, "candidates": 3}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replan": 0}, "replan and candidates are 1 or more, got 0 and 1"),
        ({"candidates": 0}, "replan and candidates are 1 or more, got None and 0"),
        ({"temperature": -0.5}, "a temperature is a number of 0 or more that noise is multiplied by, got -0.5"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": float("inf")}, "got inf"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, said):
    with pytest.raises(EngineError, match=said):
        Execution(**settings)


def test_more_actions_than_the_horizon_gives_are_refused():
    Execution(replan=9).check(9)
    with pytest.raises(EngineError, match="replan=10 executes so many actions of each chunk, and the horizon leaves 9"):
        Execution(replan=10).check(9)


def test_the_medoid_is_the_candidate_nearest_to_all_others():
    """By what is compared alone: the scale and the first actions decide."""
    row = np.array([0.0, 1.0, 1.1, 5.0])  # the sums of distances are 7.1, 5.1, 5.1 + ..., so that 1.0 or 1.1 is nearest
    first = np.stack([np.array([[value, 0.0], [100 * value, 0.0]]) for value in row])
    other = first[::-1]
    chosen = medoids(np.concatenate([first, other]), 4, np.array([1.0, 1.0]), 1)
    assert chosen.shape == (2, 2, 2)
    assert chosen[0, 0, 0] in (1.0, 1.1)
    assert np.array_equal(chosen[1, 1], [100 * chosen[1, 0, 0], 0.0])  # a whole chunk, not an average
    spread = np.array([[[0.0, 0.0]], [[1.0, 50.0]], [[2.0, 0.1]]])
    assert np.array_equal(
        medoids(spread, 3, np.array([1.0, 0.0]), 1)[0, 0], [1.0, 50.0]
    )  # the second number has no scale
    assert np.array_equal(medoids(spread, 3, np.array([0.0, 1.0]), 1)[0, 0], [2.0, 0.1])
