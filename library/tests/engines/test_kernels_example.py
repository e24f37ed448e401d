"""examples/kernels.py: every kernel of a call is counted, and its products alone are those of the program."""

from dataclasses import replace

import numpy as np
import pytest

from blockcache.models.dpt.policy import Shape
from blockcache.report.markdown import render
from repository import load_example

SHAPE = Shape(width=16, layers=2, horizon=4, n_action_steps=3, obs_dim=5, steps=6)


@pytest.fixture(scope="module")
def example():
    return load_example("kernels")


@pytest.fixture(scope="module")
def measured(example):
    return example.measure(SHAPE, rounds=2)


def test_every_product_of_every_step_is_counted(example, measured):
    profile, seconds = measured
    assert profile.products.count((4, 64, 16)) == SHAPE.layers * SHAPE.steps  # back from the feed-forward's width
    assert profile.counts["Gelu"] == SHAPE.layers * SHAPE.steps
    assert len(profile.products) == sum(profile.counts[kind] for kind in example.PRODUCTS)
    assert not set(profile.counts) & set(example.AROUND)
    assert list(seconds) == [1, 2]
    assert all(spent > 0 for found in seconds.values() for every in found.values() for spent in every)


@pytest.mark.parametrize("one_weight", [False, True])
def test_products_alone_are_these_products_and_nothing_else(example, one_weight):
    import onnx

    model = onnx.load_from_string(example.alone([(4, 16, 64), (4, 64, 16), (4, 16, 64)], one_weight))
    assert [node.op_type for node in model.graph.node] == ["MatMul"] * 3 * example.COPIES
    assert len(model.graph.initializer) == (2 if one_weight else 3)
    (made,) = example.caller(example.session(model.SerializeToString()))()
    assert made.shape == (4, 64)
    assert np.isfinite(made).all()


def test_the_page_adds_up(example, measured):
    profile, seconds = measured
    kernels = sum(profile.microseconds.values())
    assert kernels <= profile.call
    page = render(example.page(SHAPE, replace(profile, call=kernels + 2000), seconds, "python examples/kernels.py"))
    assert f"the call took {kernels / 1e3 + 2:.1f} ms, 2.0 of them between kernels" in page
    assert f"| Gelu | {SHAPE.layers:.1f} | " in page
    assert page.count("| 100% |") == 2  # products alone, with one thread and with two
    rows = [line.split("|") for line in page.partition("| kernel |")[2].splitlines()[2:] if line.startswith("| ")]
    assert len(rows) == len(profile.microseconds)
    assert sum(float(row[4].rstrip("% ")) for row in rows) == pytest.approx(100, abs=1)
