"""Statistics with answers that are known beforehand."""

import math

import numpy as np
import pytest

from blockcache.measure.statistics import Estimate, mcnemar, mean_interval, mean_jerk, paired_difference, seam_jump


def test_an_interval_of_many_normal_values_is_the_textbook_one():
    values = np.random.default_rng(3).normal(0.4, 2.0, size=2000)
    found = mean_interval(values)
    half = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert found.n == 2000


def test_an_interval_of_two_values_is_their_range():
    # resampled means are 0, 1 and 2 with chances 1/4, 1/2, 1/4
    assert mean_interval([0.0, 2.0]) == paired_difference([1.0, 4.0], [1.0, 2.0])
    found = mean_interval([0.0, 2.0])
    assert (found.mean, found.low, found.high) == (1.0, 0.0, 2.0)


def test_what_never_happened_is_not_ruled_out():
    always = mean_interval([1] * 50)
    assert always.mean == 1
    assert always.low == pytest.approx(1 / (1 + 1.96**2 / 50), abs=1e-3)  # Wilson
    same = paired_difference([1] * 50, [1] * 50)
    assert same.mean == 0
    assert same.low == pytest.approx(-same.high, abs=0.01)
    assert not same.lossless  # one loss in fifty could well go unseen
    assert paired_difference([1] * 500, [1] * 500).lossless


@pytest.mark.parametrize(("losses", "wins"), [(2, 0), (3, 0), (4, 0), (7, 0), (10, 0), (10, 1), (6, 3), (16, 3)])
def test_intervals_of_successes_agree_with_mcnemar(losses, wins):
    found = [0] * losses + [1] * wins + [1] * (60 - losses - wins)
    baseline = [1] * losses + [0] * wins + [1] * (60 - losses - wins)
    assert (paired_difference(found, baseline).high < 0) == (mcnemar(found, baseline).p < 0.05)


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = [found.low <= 0.25 <= found.high for found in (mean_interval(rng.random(60) < 0.25) for _ in range(200))]
    assert 0.90 <= np.mean(hits) <= 0.99


def test_a_rounding_error_does_not_look_like_a_loss():
    assert Estimate(-1e-17, -0.0123, 2e-5, 50).text("{:+.3f}") == "+0.000 [-0.012, +0.000]"
    assert Estimate(-0.0006, -math.inf, math.inf, 1).text("{:+.3f}") == "-0.001"


def test_pairing_counts_and_not_the_spread_of_either_side():
    baseline = np.random.default_rng(1).normal(0, 100, size=50)
    shifted = paired_difference(baseline + 0.5, baseline)
    assert shifted.low == pytest.approx(0.5)
    assert shifted.high == pytest.approx(0.5)
    assert mean_interval(baseline).high - mean_interval(baseline).low > 20


def test_equal_differences_give_an_interval_of_no_width_around_their_mean():
    found = mean_interval([0.1] * 7)
    assert found.low <= found.mean <= found.high
    assert found.high - found.low < 1e-15


def test_one_pair_says_nothing_of_the_spread():
    found = paired_difference([1.0], [0.5])
    assert (found.mean, found.low, found.high, found.n) == (0.5, -math.inf, math.inf, 1)
    assert not found.lossless


def test_the_seed_is_fixed():
    values = np.random.default_rng(5).random(30)
    assert mean_interval(values) == mean_interval(values.tolist())


def test_lossless_is_about_the_lower_end_of_the_interval():
    assert paired_difference([0.0] * 9, [0.029] * 9).lossless
    assert not paired_difference([0.0] * 9, [0.031] * 9).lossless
    # a mean difference of 0, but 10 pairs cannot rule out a loss of 0.03
    assert not paired_difference([0.0, 1.0] * 5, [1.0, 0.0] * 5).lossless


def test_mcnemar_counts_discordant_pairs_and_nothing_else():
    # 8 won, 1 lost of 9: two-sided exact p = 2 * (C(9,0) + C(9,1)) / 2^9 = 20 / 512
    found = [True] * 8 + [False] + [True] * 30 + [False] * 5
    baseline = [False] * 8 + [True] + [True] * 30 + [False] * 5
    result = mcnemar(found, baseline)
    assert (result.only_found, result.only_baseline) == (8, 1)
    assert result.p == pytest.approx(20 / 512)
    assert mcnemar(baseline, found).p == result.p


def test_mcnemar_without_discordant_pairs_is_one():
    assert mcnemar([True, False], [True, False]).p == 1.0
    assert mcnemar([], []).p == 1.0


def test_jerk_is_the_third_difference():
    steps = np.arange(8.0)[:, None]
    assert mean_jerk(steps**2) == pytest.approx(0)
    assert mean_jerk(steps**3) == pytest.approx(6)
    assert mean_jerk(np.concatenate((3 * steps**3, -4 * steps**3), axis=1)) == pytest.approx(30)  # length of (18, -24)
    assert mean_jerk(steps[:3]) is None


def test_jump_is_the_step_between_chunks():
    actions = np.array([[0, 0], [9, 9], [12, 13], [0, 0], [0, 2]], dtype=float)
    assert seam_jump(actions, [2, 4]) == pytest.approx((5 + 2) / 2)
    assert seam_jump(actions[:4], range(2, 4, 2)) == pytest.approx(5)
    assert seam_jump(actions, []) is None
    assert seam_jump(actions[:0], range(2, 0, 2)) is None


@pytest.mark.parametrize("values", [[], [math.nan], [[1.0]], [1.0, math.inf]])
def test_values_that_are_no_row_of_numbers_are_refused(values):
    with pytest.raises(ValueError, match="finite numbers"):
        mean_interval(values)


def test_pairs_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="2 and 3"):
        paired_difference([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="both sides"):
        mcnemar([True], [True, False])
