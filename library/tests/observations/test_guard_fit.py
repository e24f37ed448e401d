"""Observations that a guard cannot be made of."""

import numpy as np
import pytest

from blockcache.errors import ObservationError
from blockcache.observations.guard import fit


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"obs": np.zeros((8, 2, 3), np.float32)}, "needs 32 observations"),
        ({}, "are missing"),
        ({"obs": np.zeros((64, 2, 4), np.float32)}, "expected"),
        ({"obs": np.full((64, 2, 3), np.nan, np.float32)}, "NaN or infinity"),
    ],
)
def test_observations_that_are_refused(given, words):
    with pytest.raises(ObservationError, match=words):
        fit(given, {"obs": (2, 3)}, ())
