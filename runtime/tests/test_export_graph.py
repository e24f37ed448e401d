"""What an export may consist of: nothing is opened that blockcache does not write, and opening computes nothing."""

import re
from importlib.metadata import EntryPoint

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import blockcache as bc
from blockcache.errors import EngineError, FileError
from blockcache_runtime import graph
from blockcache_runtime.graph import OPERATORS
from blockcache_runtime.session import with_hash
from image_policies import image_policy
from onnx_files import hashed, nodes, opened, two_inputs
from rdt_policies import rdt_policy
from repository import DOCS
from toy_family import FlowPolicy

TOY = hashed(two_inputs())


# -- what may be in it


def test_the_list_has_what_is_written_and_no_more(make_policy, exports, monkeypatch, tmp_path):
    point = EntryPoint("toy-flow", "toy_family:claim", "blockcache.families")
    monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group: [point])
    bc.export_policy(FlowPolicy(), None, tmp_path / "toy.onnx")
    files = [*exports.values(), (tmp_path / "toy.onnx").read_bytes()]
    for name, sampler in SAMPLER_FORMS.items():
        bc.export_policy(make_policy(sampler=sampler), None, tmp_path / name, "action")
        files.append((tmp_path / name).read_bytes())
    for name, policy in (("cameras", image_policy()), ("rdt", rdt_policy())):
        bc.export_policy(policy, None, tmp_path / name)
        files.append((tmp_path / name).read_bytes())
    found = [node for data in files for node in nodes(onnx.load_model_from_string(data).graph)]
    assert {node.op_type for node in found} == set(OPERATORS)
    attributes = {(node.op_type, item.name) for node in found for item in node.attribute}
    assert attributes == {(kind, name) for kind, one in OPERATORS.items() for name in one.attributes}


SAMPLER_FORMS = {
    "one step": bc.samplers.DDPM(num_inference_steps=1),
    "ddim": bc.samplers.DDIM(num_inference_steps=6, eta=0.7),
    "dpm": bc.samplers.DPMSolver(num_inference_steps=6),
    "sde": bc.samplers.SDEDPMSolver(num_inference_steps=6),
}


def test_an_export_that_could_not_be_opened_is_not_written(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "_OPERATORS", {k: v for k, v in graph._OPERATORS.items() if k != b"Mish"})
    with pytest.raises(EngineError, match=r"cannot open what it would write .*the operator 'Mish', which blockcache"):
        bc.export_policy(policy, None, tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()


def endless_loop(model):
    """Its inputs are constants: ONNX Runtime runs it while a session is made, and never comes back."""
    flag = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
    count = helper.make_tensor_value_info("count", TensorProto.INT64, [])
    state = [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("x", "y")]
    steps = [helper.make_node("Identity", ["go"], ["again"]), helper.make_node("Add", ["x", "x"], ["y"])]
    flag_out = helper.make_tensor_value_info("again", TensorProto.BOOL, [])
    body = helper.make_graph(steps, "body", [count, flag, state[0]], [flag_out, state[1]])
    model.graph.node.insert(0, helper.make_node("Loop", ["", "", "half"], ["never"], body=body))
    model.graph.node[6].input[1] = "never"


def branch(model):
    body = helper.make_graph([], "body", [], [helper.make_tensor_value_info("half", TensorProto.FLOAT, [])])
    model.graph.node.append(helper.make_node("If", ["half"], ["z"], then_branch=body, else_branch=body))


def other_domain(model):
    model.graph.node[0].domain = "com.microsoft"


def local_function(model):
    model.functions.add(name="Add", domain="")


def training(model):
    model.training_info.add()


def external_data(model):
    constant = model.graph.initializer[1]
    constant.ClearField("raw_data")
    constant.external_data.add(key="location", value="/etc/passwd")
    constant.data_location = TensorProto.EXTERNAL


def sparse_constant(model):
    model.graph.sparse_initializer.add()


def emptied_input(model):
    model.graph.node[-1].input[1] = ""


def missing_input(model):
    del model.graph.node[-1].input[1]


def undeclared(model):
    model.graph.node[-1].input[1] = "nowhere"


def too_early(model):
    first = model.graph.node.pop(0)
    model.graph.node.append(first)


def doubled_output(model):
    model.graph.node[-2].output[0] = "means"


def doubled_constant(model):
    model.graph.initializer.append(model.graph.initializer[0])


def unnamed_output(model):
    model.graph.node[0].output[1] = ""


def no_such_output(model):
    model.graph.node[-1].output[0] = "other"


def optional_output(model):
    model.graph.node[-1].output.append("more")


def cut_constant(model):
    model.graph.initializer[1].raw_data = b"short"


def vast_constant(model):
    model.graph.initializer[1].dims[:] = [2**62, 2**62]


def empty_constant(model):
    model.graph.initializer[1].dims[:] = [0, 2**40]
    model.graph.initializer[1].raw_data = b""


def vast_shape(model):
    """ONNX Runtime counts up to it while it loads."""
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array([-1, 2**40, 3]), "shape"))


def vast_input(model):
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_value = 2**40


def texts(model):
    model.graph.initializer[1].data_type = TensorProto.STRING


def other_attribute(model):
    model.graph.node[0].attribute[0].name = "scales"


def doubled_attribute(model):
    model.graph.node[0].attribute.append(model.graph.node[0].attribute[0])


def graph_as_attribute(model):
    model.graph.node[0].attribute[0].g.name = "hidden"


def fewer_outputs(model):
    (count,) = (item for item in model.graph.node[0].attribute if item.name == "num_outputs")
    count.i = 1


def no_heads(model):
    """ONNX Runtime divides by it: at the first call the process is gone."""
    settings = {"q_num_heads": 0, "kv_num_heads": 1, "is_causal": 0, "scale": 1.0}
    model.graph.node.insert(0, helper.make_node("Attention", ["arm", "arm", "arm"], ["seen"], **settings))


REFUSED = {
    no_heads: "its Attention has q_num_heads 0",
    endless_loop: "it uses the operator 'Loop'",
    branch: "it uses the operator 'If'",
    other_domain: "its node has field 7 of ONNX",
    local_function: "its model has field 25 of ONNX",
    training: "its model has field 20 of ONNX",
    external_data: "its constant has field 13 of ONNX",
    sparse_constant: "its graph has field 15 of ONNX",
    emptied_input: "its Add takes '', which nothing before it gives",
    missing_input: "its Add has 1 inputs",
    undeclared: "its Add takes 'nowhere', which nothing before it gives",
    too_early: "its Add takes 'arm_0', which nothing before it gives",
    doubled_output: "the name 'means' in it stands for two things",
    doubled_constant: "the name 'half' in it stands for two things",
    unnamed_output: "a value in it has no name",
    no_such_output: "nothing in it gives its output 'action'",
    optional_output: "its Add has 2 outputs",
    cut_constant: "its constant 'shape' is not as large as its type and shape say",
    vast_constant: "its constant 'shape' is not as large as its type and shape say",
    empty_constant: "its constant 'shape' is not as large as its type and shape say",
    vast_shape: "its constant 'shape' holds a number beyond 16,777,216",
    vast_input: "one of its inputs or outputs has a size beyond 16,777,216",
    texts: "its constant 'shape' is not as large as its type and shape say",
    other_attribute: "its Split has the attribute 'scales'",
    doubled_attribute: "its Split has an attribute twice",
    graph_as_attribute: "its attribute has field 6 of ONNX",
    fewer_outputs: "its Split has 2 outputs and says that it has others",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_blockcache_does_not_write_is_not_opened(change, monkeypatch):
    def forbid(*args, **settings):
        raise AssertionError("a session is made of this")

    monkeypatch.setattr(onnxruntime, "InferenceSession", forbid)
    model = two_inputs()
    change(model)
    with pytest.raises(FileError) as caught:
        opened(hashed(model))
    assert re.fullmatch(
        rf"the ONNX file toy.onnx is garbled \({re.escape(REFUSED[change])}.*\); export it again", str(caught.value)
    )


def no_rows(scan):
    scan.attribute[1].i = 0


def rows_only(scan):
    scan.attribute[1].i = len(scan.input)


def backwards(scan):
    scan.attribute.append(helper.make_attribute("scan_input_directions", [1]))


def fewer_inputs(scan):
    del scan.attribute[0].g.input[-1]
    del scan.attribute[0].g.node[:]
    del scan.attribute[0].g.output[:]


def within_itself(scan):
    scan.attribute[0].g.node.append(helper.make_node("Scan", ["x", "x", "x"], ["p", "q"], num_scan_inputs=1))


@pytest.mark.parametrize("change", [no_rows, rows_only, backwards, fewer_inputs, within_itself])
def test_a_scan_is_one_step_for_each_row_of_its_inputs(exports, change):
    model = onnx.load_model_from_string(exports["full"])
    (scan,) = (node for node in model.graph.node if node.op_type == "Scan")
    assert [item.name for item in scan.attribute] == ["body", "num_scan_inputs"]
    change(scan)
    with pytest.raises(
        FileError, match=r"repeats a step in another way|different numbers of inputs|its Scan has field 8"
    ):
        opened(hashed(model))


def test_names_of_a_step_are_its_own(exports):
    model = onnx.load_model_from_string(exports["full"])
    (scan,) = (node for node in model.graph.node if node.op_type == "Scan")
    model.graph.node[-1].input[0] = scan.attribute[0].g.node[0].output[0]
    with pytest.raises(FileError, match="takes 's0', which nothing before it gives"):
        opened(hashed(model))


def test_two_graphs_in_one_file_are_refused():
    """Protobuf would merge them into one that nobody looked at."""
    model = two_inputs()
    extra = onnx.ModelProto()
    extra.graph.node.add(op_type="Loop")
    with pytest.raises(FileError, match="it has 2 graphs, expected one"):
        opened(with_hash(model.SerializeToString() + extra.SerializeToString()))


def test_opening_folds_no_constants(monkeypatch):
    """Folding runs parts of the graph, and a list of allowed operators does not bound what they take."""
    asked = []
    whole = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *args, **how: asked.append(args) or whole(*args, **how))
    opened(TOY)
    ((_, options),) = asked
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def test_the_page_lists_the_operators():
    page = (DOCS / "on-a-robot.md").read_text()
    listed = page.split("Only the operators that blockcache writes, as it writes them: ")[1].split(". Refused")[0]
    words = re.sub(r"\(.*?\)|\bone\b", "", listed).replace("\n", " ").split(",")
    assert sorted(word.strip() for word in words) == sorted(OPERATORS)
