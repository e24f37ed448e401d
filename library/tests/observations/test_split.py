"""Observations dealt to disjoint parts: by value, never twice, refused when there are too few."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockcache.errors import ObservationError
from blockcache.observations import pick, split


def values(batch, places):
    return {float(value) for value in batch[list(places), 0, 0]}


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(0, 4), st.integers(0, 4), st.integers(0, 9))
def test_parts_share_no_value_and_do_not_depend_on_the_order(numbers, one, other, seed):
    batch = np.array(numbers, dtype=np.float32).reshape(-1, 1, 1)
    taken = batch[:2]
    free = set(numbers) - set(numbers[:2])
    sizes = {"calibration": one, "distances": other}
    if one + other > len(free):
        with pytest.raises(ObservationError, match=f"need {one + other} different observations, got {len(free)};"):
            split(batch, sizes, seed, taken)
        return
    found = {name: values(batch, places) for name, places in split(batch, sizes, seed, taken).items()}
    assert {name: len(part) for name, part in found.items()} == sizes
    assert not found["calibration"] & found["distances"]
    assert found["calibration"] | found["distances"] <= free
    turned = batch[::-1].copy()
    again = {name: values(turned, places) for name, places in split(turned, sizes, seed, taken).items()}
    assert again == found


def test_another_seed_deals_anew_and_the_same_one_does_not():
    batch = np.arange(40.0).reshape(-1, 1, 1)
    one, again, other = (split(batch, {"a": 10, "b": 10}, seed) for seed in (0, 0, 1))
    assert [list(part) for part in one.values()] == [list(part) for part in again.values()]
    assert set(one["a"]) != set(other["a"])
    assert set(split(batch, {"a": 20, "b": 5})["a"]) == set(one["a"]) | set(one["b"])


def test_mappings_and_tensors_are_dealt_and_picked_alike():
    batch = {"image": torch.arange(12.0).reshape(6, 2), "state": np.arange(18.0).reshape(6, 3), "rate": 10}
    places = split(batch, {"some": 3})["some"]
    found = pick(batch, places)
    assert found["rate"] == 10
    np.testing.assert_array_equal(found["image"], batch["image"][torch.as_tensor(places)])
    np.testing.assert_array_equal(found["state"], batch["state"][places])


def test_a_sentence_says_what_each_part_needs():
    with pytest.raises(
        ObservationError, match="2 for calibration and 3 for fitting need 5 different observations, got 4; "
    ):
        split(np.arange(4.0).reshape(-1, 1, 1), {"calibration": 2, "fitting": 3})
