"""Each metric against a loop over pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from blockcache.solvers.recording import METRICS, SIMILARITIES, cosine

NAIVE = {
    "cosine": lambda a, b: a @ b / np.sqrt((a @ a) * (b @ b)),
    "mse": lambda a, b: sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a),
    "l1": lambda a, b: sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a),
    "wasserstein": lambda a, b: sum(abs(x - y) for x, y in zip(sorted(a), sorted(b), strict=True)) / len(a),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (7, 12)])
def test_against_a_loop(name, shape):
    features = np.random.default_rng(0).normal(size=shape) + 0.3
    expected = [[NAIVE[name](a, b) for b in features] for a in features]
    np.testing.assert_allclose(METRICS[name](features), expected, rtol=1e-12, atol=1e-12)


def test_the_loops_cover_all_metrics():
    assert set(NAIVE) == set(METRICS)
    assert {"cosine"} == SIMILARITIES


@given(features=arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.floats(-1e3, 1e3)))
def test_properties(features):
    for name, metric in METRICS.items():
        matrix = metric(features)
        assert matrix.shape == (len(features), len(features))
        assert np.isfinite(matrix).all()
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_array_equal(np.diagonal(matrix), 1.0 if name in SIMILARITIES else 0.0)
        assert (np.abs(matrix) <= 1).all() if name in SIMILARITIES else (matrix >= 0).all()


def test_wasserstein_sees_values_not_places():
    features = np.array([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0], [2.0, 3.0, 4.0]])
    assert METRICS["wasserstein"](features)[0].tolist() == [0.0, 0.0, 1.0]
    assert METRICS["l1"](features)[0, 1] > 0


def test_cosine_of_zero_vectors():
    matrix = cosine(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))
    assert matrix.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
