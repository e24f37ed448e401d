"""Features of a method's actions: what each number is, on chunks whose arithmetic is plain."""

import numpy as np
import pytest

from blockcache.measure.distance import distances
from blockcache.measure.features import ActionFeatures, action_features, flattened, roughness

DRAW = np.random.default_rng(3)
OWN = np.cumsum(DRAW.normal(0, 0.1, (6, 16, 5, 2)), axis=2)


def test_roughness_is_the_second_difference_for_each_value():
    line = np.arange(5.0)[:, None] * np.array([1.0, -2.0])
    assert roughness(line[None, None]) == 0
    zigzag = np.array([0.0, 1, 0, 1, 0])[:, None] * np.array([3.0, 4.0])  # second differences (-6, -8), (6, 8), ...
    assert roughness(zigzag[None, None]) == pytest.approx(10 / np.sqrt(2))
    assert roughness(np.zeros((1, 1, 2, 3))) == 0  # two actions have none


def test_the_policys_own_chunks_have_nothing_added():
    found = action_features(OWN, OWN)
    assert (found.shift, found.beyond_spread, found.wider, found.rougher) == pytest.approx((0, 0, 0, 0), abs=1e-9)
    assert found.own_roughness == roughness(OWN)
    assert found.own_spread > 0


def test_each_feature_sees_its_own_change_and_no_other():
    own = action_features(OWN, OWN)
    moved = action_features(OWN + 0.5, OWN)
    assert moved.shift == pytest.approx(0.5)  # for each value, however many a chunk has
    assert (moved.wider, moved.rougher) == pytest.approx((0, 0), abs=1e-9)
    assert moved.beyond_spread > 0.5
    centre = OWN.mean(axis=1, keepdims=True)
    sharper = action_features(centre + (OWN - centre) / 2, OWN)
    assert sharper.wider == pytest.approx(-0.5)
    assert abs(sharper.shift) < 0.05  # but for chance
    shaken = OWN + np.array([0.1, -0.1, 0.1, -0.1, 0.1])[:, None]
    assert action_features(shaken, OWN).rougher > 0.1 > abs(own.rougher)


def test_what_is_known_of_the_distances_is_taken_over():
    other = OWN[:, ::-1] * 1.1
    apart = distances(flattened(other), flattened(OWN))
    assert action_features(other, OWN, apart) == action_features(other, OWN)


def test_single_actions_with_a_gripper_that_never_moves_have_features_too():
    own = np.random.default_rng(3).normal(size=(4, 8, 1, 14))
    own[..., -1] = 1.0
    found = action_features(own * [*[1.0] * 13, -1.0], own)  # opened where the policy holds
    assert (found.rougher, found.own_roughness) == (0.0, 0.0)  # one action has no second difference
    assert found.shift == pytest.approx(2 / 14**0.5)


def test_a_policy_that_draws_no_noise_and_features_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="samples are all equal"):
        action_features(OWN, np.zeros_like(OWN))
    with pytest.raises(ValueError, match="the feature wider is not finite"):
        ActionFeatures(0.0, 0.0, np.inf, 0.0, 1.0, 1.0)
