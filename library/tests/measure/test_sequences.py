"""Intervals that hold at every moment."""

import itertools

import numpy as np
import pytest

from blockcache.measure.sequences import valid_interval

# differences of scores with a known mean: ties, losses and wins of whole episodes; and scores between 0 and 1
DRAWS = {
    "few losses": (lambda rng, n: -(rng.random(n) < 0.03).astype(float), -0.03),
    "losses and wins": (lambda rng, n: rng.choice([-1.0, 0.0, 1.0], n, p=[0.15, 0.75, 0.1]), -0.05),
    "coverage": (lambda rng, n: rng.beta(0.4, 0.2, n) - rng.beta(0.4, 0.2, n), 0.0),
    "skewed": (lambda rng, n: np.where(rng.random(n) < 0.02, -1.0, 0.02), 0.98 * 0.02 - 0.02),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_interval_holds_at_all_moments_together(name):
    draw, mean = DRAWS[name]
    rng, sequences, missed = np.random.default_rng(5), 200, 0
    for _ in range(sequences):
        found = valid_interval(draw(rng, 240))  # what was ruled out at any moment stays so
        missed += not found.low - 1e-9 <= mean <= found.high + 1e-9
    assert missed / sequences <= 0.05


def test_more_values_never_widen_the_interval():
    values = DRAWS["losses and wins"][0](np.random.default_rng(2), 120)
    found = [valid_interval(values[:n]) for n in (10, 30, 60, 120)]
    for before, after in itertools.pairwise(found):
        assert before.low - 0.001 <= after.low or after.mean < before.low
        assert before.high + 0.001 >= after.high or after.mean > before.high


def test_a_fixed_interval_would_not_hold():
    """Of what the test above could not find out: 1.96 standard errors, looked at as often."""
    rng, missed = np.random.default_rng(5), 0
    for _ in range(200):
        values = DRAWS["coverage"][0](rng, 240)
        missed += any(abs(values[:n].mean()) > 1.96 * values[:n].std() / np.sqrt(n) for n in (10, 20, 40, 80, 160, 240))
    assert missed / 200 > 0.1


def test_verdicts_are_reached():
    rng = np.random.default_rng(1)
    ties, bad = valid_interval(np.zeros(150)), valid_interval(rng.choice([-1.0, 0.0], 60, p=[0.4, 0.6]))
    assert ties.settled
    assert ties.lossless
    assert ties.low < 0 < ties.high
    assert bad.settled
    assert not bad.lossless
    assert bad.high < 0
    assert not valid_interval(np.zeros(60)).settled
    assert valid_interval([1.0]).low < 0  # one value says little, but the mean stays inside
    assert valid_interval([-1.0] * 500).high < -0.95


@pytest.mark.parametrize("values", [[], [[0.0]], [1.5], [np.nan]])
def test_what_no_interval_can_be_had_of_is_refused(values):
    with pytest.raises(ValueError, match="from -1 to 1"):
        valid_interval(values)
