"""Where the time of an export goes: kinds of nodes by themselves."""

import numpy as np
import onnx
import pytest

from blockcache_lab.studies import limits
from blockcache_runtime.providers import new_session
from onnx_files import nodes

pytestmark = pytest.mark.usefixtures("exports_stay_here")


@pytest.fixture
def export(exports):
    return exports["schedule"]


def test_every_node_is_timed_once_by_itself_and_once_with_all_others(export, monkeypatch):
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    found = limits.measure_limits(export, threads=1, repeats=3, progress=False)
    kinds = {kind["kind"]: kind for kind in found["kinds"]}
    whole, again = kinds.pop(limits.WHOLE), kinds.pop(limits.ONE_OF_EACH)
    written = [*nodes(onnx.load_model_from_string(export).graph)]
    assert whole["nodes"] == sum(kind["nodes"] for kind in kinds.values()) == len(written)
    weighted = [node for node in written if node.op_type in ("Gemm", "MatMul") and "_w" in node.input[1]]
    assert again["nodes"] == kinds[limits.PRODUCTS]["nodes"] >= len(weighted) > 20
    assert all(kind["ms"] > 0 for kind in found["kinds"])
    assert {kind["kind"] for kind in found["kinds"] if kind["gflops"]} == {limits.PRODUCTS, limits.ONE_OF_EACH}
    assert (found["threads"], found["peak_gflops"] > 0) == (1, True)


def test_a_kind_by_itself_computes_what_it_does_in_the_whole(export):
    """The last product is the head's, of rows that are given."""
    graph = limits._Graph(export)
    alone = onnx.load_model_from_string(graph.alone(graph.groups()[limits.PRODUCTS]))
    constants = {item.name: onnx.numpy_helper.to_array(item) for item in alone.graph.initializer}
    rows, weight, bias = alone.graph.node[-1].input
    session = new_session(alone.SerializeToString(), 1)
    feed = {
        item.name: np.random.default_rng(0).standard_normal(item.shape, dtype=np.float32)
        for item in session.get_inputs()
    }
    (found,) = session.run(None, feed)
    assert weight == "head_w"
    assert np.allclose(found, feed[rows] @ constants[weight] + constants[bias], atol=1e-5)


def test_one_matrix_of_each_shape_is_few_weights(export):
    graph = limits._Graph(export)
    products = graph.groups()[limits.PRODUCTS]
    sizes = [
        {tuple(item.dims) for item in onnx.load_from_string(data).graph.initializer}
        for data in (graph.alone(products), graph.alone(products, shared=True))
    ]
    counts = [
        len(onnx.load_from_string(data).graph.initializer)
        for data in (graph.alone(products), graph.alone(products, shared=True))
    ]
    assert sizes[0] == sizes[1]
    assert counts[1] == len(sizes[1]) < counts[0]
