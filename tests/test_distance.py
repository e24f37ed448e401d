"""Distances between clouds of actions: known answers, invariances, brute force, and no bias."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcache.measure.distance import distances, pair_distances, signed_root, squared_shifts
from blockcache.measure.statistics import mean_interval, ratio_interval


def clouds(seed, observations=6, samples=5, others=4, features=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(observations, samples, features)), rng.normal(1, 2, size=(observations, others, features))


def brute(found, reference):
    """Every mean as a loop over pairs."""
    between = [np.mean([math.dist(x, y) for x in a for y in b]) for a, b in zip(found, reference, strict=True)]
    inside = [
        [np.mean([math.dist(x, y) for i, x in enumerate(a) for j, y in enumerate(a) if i != j]) for a in cloud]
        for cloud in (found, reference)
    ]
    return np.array(between), *map(np.array, inside)


@settings(max_examples=25)
@given(st.integers(0, 2**20), st.integers(1, 4), st.integers(2, 6), st.integers(2, 6), st.integers(1, 4))
def test_every_distance_is_what_a_loop_over_all_pairs_gives(seed, observations, samples, others, features):
    found, reference = clouds(seed, observations, samples, others, features)
    between, one, other = brute(found, reference)
    pairs = pair_distances(found, reference)
    assert np.allclose(pairs.between, between)
    assert np.allclose(pairs.inside_found, one)
    assert np.allclose(pairs.inside_reference, other)
    # a product of two different samples' differences has no noise in its mean: the square without its bias
    products = [
        np.mean([(x - y) @ (u - v) for i, x in enumerate(a) for k, u in enumerate(a) if i != k
                 for j, y in enumerate(b) for m, v in enumerate(b) if j != m])
        for a, b in zip(found, reference, strict=True)
    ]  # fmt: skip
    assert np.allclose(squared_shifts(found, reference), products)
    whole = distances(found, reference)
    assert whole.energy.mean == pytest.approx((2 * between - one - other).mean() / other.mean())
    assert whole.spread.mean == pytest.approx(one.mean() / other.mean())
    assert whole.centre_shift.mean == pytest.approx(signed_root(float(np.mean(products))), abs=1e-7)


def test_equal_distributions_are_at_distance_0_on_average():
    rng = np.random.default_rng(0)
    found, reference = rng.normal(size=(2, 600, 4, 3))  # few samples, where a bias would be large
    shift = mean_interval(squared_shifts(found, reference))
    pairs = pair_distances(found, reference)
    energy, spread = mean_interval(pairs.energy), ratio_interval(pairs.inside_found, pairs.inside_reference)
    for estimate, truth in ((shift, 0), (energy, 0), (spread, 1)):
        assert estimate.low < truth < estimate.high
        assert estimate.high - estimate.low < 0.3
    naive = ((found.mean(axis=1) - reference.mean(axis=1)) ** 2).sum(axis=-1).mean()
    assert naive == pytest.approx(1.5, abs=0.1)  # what the means' own scatter would have put there


def test_gaussians_have_the_distances_of_the_textbook():
    """In one dimension E|N(m, s^2)| is known, and with it every part."""
    rng = np.random.default_rng(1)

    def expected_size(mean, sigma):
        inner = sigma * math.sqrt(2 / math.pi) * math.exp(-(mean**2) / (2 * sigma**2))
        return inner + mean * math.erf(mean / (sigma * math.sqrt(2)))

    found, reference = 0.7 + 0.5 * rng.normal(size=(200, 100, 1)), rng.normal(size=(200, 100, 1))
    whole = distances(found, reference)
    inside, other = expected_size(0, 0.5 * math.sqrt(2)), expected_size(0, math.sqrt(2))
    energy = 2 * expected_size(0.7, math.sqrt(1.25)) - inside - other
    for estimate, truth in ((whole.centre_shift, 0.7), (whole.spread, 0.5), (whole.energy, energy / other)):
        assert estimate.mean == pytest.approx(truth, rel=0.03)
        assert estimate.low < truth < estimate.high


def test_neither_a_turn_nor_a_common_shift_nor_the_order_of_samples_counts_and_the_scale_only_in_the_shift():
    found, reference = clouds(3, observations=8, samples=12, others=9)
    rng = np.random.default_rng(4)
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    before = distances(found, reference)
    places = rng.normal(size=(8, 1, 3))  # another one for each observation: only differences count
    moved = distances(
        (2 * found @ turn + places)[:, rng.permutation(12)], (2 * reference @ turn + places)[:, rng.permutation(9)]
    )
    assert moved.energy.mean == pytest.approx(before.energy.mean)
    assert moved.energy.low == pytest.approx(before.energy.low)
    assert moved.spread.mean == pytest.approx(before.spread.mean)
    assert moved.centre_shift.mean == pytest.approx(2 * before.centre_shift.mean)
    assert moved.centre_shift.high == pytest.approx(2 * before.centre_shift.high)


def test_a_difference_at_one_observation_is_not_hidden_by_its_neighbours():
    """The same chunks, at other observations: equal all together, far apart one by one."""
    rng = np.random.default_rng(5)
    reference = rng.normal(size=(10, 30, 2)) + np.arange(10)[:, None, None]
    turned = distances(rng.normal(size=(10, 30, 2)) + np.arange(10)[::-1, None, None], reference)
    assert turned.centre_shift.low > 3
    assert turned.energy.low > 1


def test_a_square_below_zero_has_minus_the_root_of_its_amount():
    assert [signed_root(value) for value in (-4.0, 0.0, 9.0)] == [-2, 0, 3]
    alternating = np.tile([[-1.0], [1.0]], (5, 10, 1))
    shift = distances(alternating, alternating).centre_shift  # the same mean: less than chance would have it
    assert shift.mean == shift.low == shift.high == pytest.approx(-math.sqrt(2 * 20 / 19 / 20))


def test_sixty_four_samples_at_a_hundred_observations_are_ready_at_once():
    rng = np.random.default_rng(6)
    found = distances(*rng.normal(size=(2, 100, 64, 16)))
    assert found.energy.n == 100
    assert found.energy.low < 0 < found.energy.high < 0.02


def test_an_interval_of_ratios_resamples_both_sides_together():
    assert ratio_interval([1, 2, 3], [2, 4, 6]) == ratio_interval([3, 1, 2], [6, 2, 4])
    found = ratio_interval([1, 2, 3], [2, 4, 6])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    wide = ratio_interval([0.0, 2.0], [1.0, 1.0])
    assert (wide.mean, wide.low, wide.high) == (1.0, 0.0, 2.0)
    assert ratio_interval([3], [2]).low == -math.inf
    with pytest.raises(ValueError, match="a sum below that is not 0"):
        ratio_interval([1, 2], [1, -1])


@pytest.mark.parametrize(
    ("found", "reference", "said"),
    [
        (np.zeros((4, 5)), np.zeros((4, 5)), r"got \(4, 5\) and \(4, 5\)"),
        (np.zeros((4, 5, 2)), np.zeros((3, 5, 2)), "same observations"),
        (np.zeros((4, 5, 2)), np.zeros((4, 5, 3)), "same observations and features"),
        (np.zeros((4, 1, 2)), np.zeros((4, 5, 2)), "at least 2 samples"),
        (np.zeros((0, 5, 2)), np.zeros((0, 5, 2)), "clouds need the shape"),
        (np.full((4, 5, 2), np.nan), np.zeros((4, 5, 2)), "NaN or infinity"),
        (np.ones((4, 5, 2)), np.zeros((4, 5, 2)), "samples are all equal"),
    ],
)
def test_what_is_no_pair_of_clouds_is_refused(found, reference, said):
    with pytest.raises(ValueError, match=said):
        distances(found, reference)
