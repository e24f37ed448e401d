"""Distances between clouds of actions: known answers, invariances, brute force, and no bias."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcache.measure.distance import distances, pair_distances, shifts, signed_root
from blockcache.measure.statistics import interval_of


def clouds(seed, observations=6, samples=5, others=4, features=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(observations, samples, features)), rng.normal(1, 2, size=(observations, others, features))


def brute(found, reference):
    """Every mean as a loop over pairs; of two clouds, samples at the same place may share their noise and are no pair."""
    between = [
        np.mean([math.dist(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i != j])
        for a, b in zip(found, reference, strict=True)
    ]
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
    assert len(pairs) == 3
    assert all(np.allclose(*pair) for pair in zip(pairs, (between, one, other), strict=True))
    whole = distances(found, reference)
    energy, spread = (2 * between - one - other).mean() / other.mean(), one.mean() / other.mean()
    assert whole.energy.mean == pytest.approx(energy)
    assert whole.spread.mean == pytest.approx(spread)
    assert whole.beyond_spread.mean == pytest.approx(energy - math.sqrt(2 + 2 * spread**2) + 1 + spread)
    assert whole.centre_shift.mean == pytest.approx(shifts(found, reference).mean())


@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 4))
def test_two_samples_have_one_cut_and_the_shift_is_the_root_of_the_product(seed, observations, features):
    found, reference = clouds(seed, observations, 2, 2, features)
    apart = found - reference
    products = [float(first @ second) for first, second in apart]
    expected = [math.copysign(math.sqrt(abs(value)), value) for value in products]
    assert np.allclose(shifts(found, reference), expected)


@settings(max_examples=20)
@given(st.integers(2, 9), st.integers(2, 9))
def test_a_shift_without_scatter_is_found_exactly_whatever_the_numbers_of_samples(samples, others):
    found, reference = np.tile([3.0, 4.0], (2, samples, 1)), np.zeros((2, others, 2))
    np.testing.assert_allclose(shifts(found, reference), 5)


@pytest.mark.parametrize("shared", [False, True])
def test_equal_distributions_are_at_distance_0_on_average_whether_noise_is_shared_or_not(shared):
    """Few samples, where a bias would be large; skewed, so that nothing cancels by symmetry."""
    rng = np.random.default_rng(0)
    noise, other = rng.normal(size=(2, 300, 4, 3)) ** 2
    found, reference = noise, (noise + other) / 2 if shared else other
    if shared:  # the same distribution, half of it the very same noise
        found = (noise + rng.normal(size=noise.shape) ** 2) / 2
    whole = distances(found, reference)
    for estimate, truth in (
        (whole.centre_shift, 0),
        (whole.energy, 0),
        (whole.beyond_spread, 0),
        (whole.spread, 1),
    ):
        assert estimate.low < truth < estimate.high
        assert estimate.high - estimate.low < 0.4
    naive = np.linalg.norm(found.mean(axis=1) - reference.mean(axis=1), axis=-1).mean()
    assert naive > 0.6  # what the means' own scatter would have put there


def test_shared_noise_makes_the_estimates_steadier():
    rng = np.random.default_rng(2)
    noise, other = rng.normal(size=(2, 40, 8, 3))
    shared, apart = distances(0.9 * noise + 0.1, noise), distances(0.9 * noise + 0.1, other)
    for name in ("centre_shift", "energy"):
        one, two = getattr(shared, name), getattr(apart, name)
        assert one.high - one.low < 0.6 * (two.high - two.low)
    assert shared.centre_shift.low < 0.1 * math.sqrt(3) < shared.centre_shift.high


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


def test_normal_clouds_of_one_centre_have_no_energy_beyond_their_spread():
    rng = np.random.default_rng(0)
    apart = distances(0.6 * rng.normal(size=(60, 60, 16)), rng.normal(size=(60, 60, 16)))
    assert apart.energy.mean > 0.04
    assert apart.beyond_spread.mean == pytest.approx(0, abs=0.004)


def test_neither_a_turn_nor_a_common_shift_counts_and_the_scale_only_in_the_centre_shift():
    found, reference = clouds(3, observations=8, samples=12, others=9)
    rng = np.random.default_rng(4)
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    before = distances(found, reference)
    places = rng.normal(size=(8, 1, 3))  # another one for each observation: only differences count
    moved = distances(2 * found @ turn + places, 2 * reference @ turn + places)
    for name, factor in (("energy", 1), ("spread", 1), ("beyond_spread", 1), ("centre_shift", 2)):
        one, other = getattr(before, name), getattr(moved, name)
        assert (other.low, other.mean, other.high) == pytest.approx(
            (factor * one.low, factor * one.mean, factor * one.high)
        )


def test_a_difference_at_one_observation_is_not_hidden_by_its_neighbours():
    """The same chunks, at other observations: equal all together, far apart one by one."""
    rng = np.random.default_rng(5)
    reference = rng.normal(size=(10, 30, 2)) + np.arange(10)[:, None, None]
    turned = distances(rng.normal(size=(10, 30, 2)) + np.arange(10)[::-1, None, None], reference)
    assert turned.centre_shift.low > 3
    assert turned.energy.low > 1


def test_a_cloud_is_at_distance_0_from_itself_and_its_interval_is_that_point():
    found, _ = clouds(7)
    whole = distances(found, found)
    for estimate, truth in ((whole.centre_shift, 0), (whole.energy, 0), (whole.beyond_spread, 0), (whole.spread, 1)):
        assert (estimate.low, estimate.mean, estimate.high) == pytest.approx((truth, truth, truth), abs=1e-12)
    assert signed_root(np.array([-4.0, 0.0, 9.0])).tolist() == [-2, 0, 3]


def test_sixty_four_samples_at_a_hundred_observations_are_ready_at_once():
    rng = np.random.default_rng(6)
    found = distances(*rng.normal(size=(2, 100, 64, 16)))
    assert found.energy.n == 100
    assert found.energy.low < 0 < found.energy.high < 0.02


def test_an_interval_of_ratios_resamples_both_sides_together():
    found = interval_of(np.divide, [1, 2, 3], [2, 4, 6])
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    wide = interval_of(np.divide, [0.0, 2.0], [1.0, 1.0])
    assert (wide.mean, wide.low, wide.high) == (1.0, 0.0, 2.0)
    assert interval_of(np.divide, [3], [2]).low == -math.inf
    with pytest.raises(ValueError, match="finite numbers"):
        interval_of(np.divide, [1, np.nan], [1, 1])


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
