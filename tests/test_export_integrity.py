"""What an export may be: every byte is hashed, and nothing is opened that blockcache does not write."""

import random
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import blockcache as bc
from blockcache.deploy import ExportedPolicy, graph, protobuf
from blockcache.deploy.graph import OPERATORS, check_model, read_metadata
from blockcache.deploy.integrity import KEY, is_intact, with_hash
from blockcache.errors import ContentError, EngineError, FileError
from onnx_files import BLOCKS, hashed, metadata, nodes, two_inputs
from toy_family import FlowPolicy

TOY = hashed(two_inputs())
DAMAGED = "the ONNX file toy.onnx was changed or damaged after it was written; export it again"
GARBLED = r"the ONNX file toy.onnx is garbled \(.*\); export it again"
OBSERVED = {"arm": np.ones((1, 2, 2)), "ball": np.ones((1, 2, 1))}


def opened(data):
    return ExportedPolicy("toy.onnx", 1, data)


@pytest.fixture(scope="module")
def exports(make_policy, tmp_path_factory):
    """A tiny policy under a schedule and in full precision (with a Scan)."""
    directory = tmp_path_factory.mktemp("exports")
    schedule = bc.Schedule(6, dict.fromkeys(BLOCKS, (0, 2, 4)))
    for name, followed in (("schedule", schedule), ("full", None)):
        bc.export_policy(make_policy(), followed, directory / name)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# -- the hash


def test_a_flipped_bit_is_noticed_wherever_it_is():
    assert opened(TOY).predict_action(OBSERVED, seed=0)["action"].shape == (1, 1, 3)
    for position in range(len(TOY)):
        for bit in range(8):
            data = bytearray(TOY)
            data[position] ^= 1 << bit
            with pytest.raises(FileError) as caught:
                opened(bytes(data))
            garbled = position >= len(TOY) - 87 and re.fullmatch(GARBLED, str(caught.value))  # how the hash begins
            assert garbled or str(caught.value) == DAMAGED


@pytest.mark.parametrize("name", ["schedule", "full"])
def test_every_byte_of_an_export_is_hashed(exports, name):
    data = bytearray(exports[name])
    assert is_intact(bytes(data))
    for position in [*range(0, len(data), 97), *range(len(data) - 200, len(data))]:
        data[position] ^= 1 << position % 8
        assert not is_intact(bytes(data))
        data[position] ^= 1 << position % 8
    assert is_intact(bytes(data))
    for other in (data[:-1], data[1:], data + b"\0", b"", data[-87:], data + data[-87:]):
        assert not is_intact(bytes(other))


def test_a_file_without_its_hash_or_with_another_is_refused():
    bare = two_inputs().SerializeToString()
    for data in (bare, TOY[:-64] + b"0" * 64, bare + TOY[-87:-64] + b"0" * 64, TOY + TOY[-87:]):
        with pytest.raises(FileError, match=f"^{DAMAGED}$"):
            opened(data)


def test_the_hash_is_an_entry_of_the_metadata(exports, tmp_path):
    """So other programs open the file as before, and saving it unchanged with the onnx library keeps it whole."""
    for data in exports.values():
        model = onnx.load_model_from_string(data)
        onnx.checker.check_model(model)
        assert list(metadata(model)) == ["blockcache", KEY]
        assert read_metadata(data) == metadata(model)
        assert len(metadata(model)[KEY]) == 64
        assert model.SerializeToString() == data


# -- what may be in it


def test_the_list_has_what_is_written_and_no_more(make_policy, exports, monkeypatch, tmp_path):
    point = EntryPoint("toy-flow", "toy_family:claim", "blockcache.families")
    monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group: [point])
    bc.export_policy(FlowPolicy(), None, tmp_path / "toy.onnx")
    files = [*exports.values(), (tmp_path / "toy.onnx").read_bytes()]
    for name, sampler in SAMPLER_FORMS.items():
        bc.export_policy(make_policy(sampler=sampler), None, tmp_path / name, "action")
        files.append((tmp_path / name).read_bytes())
    found = [node for data in files for node in nodes(onnx.load_model_from_string(data).graph)]
    assert {node.op_type for node in found} == set(OPERATORS)
    attributes = {(node.op_type, item.name) for node in found for item in node.attribute}
    # the tanh form of Gelu is no family's of ours; test_backends writes it
    assert attributes == {(kind, name) for kind, one in OPERATORS.items() for name in one.attributes} - {
        ("Gelu", "approximate")
    }


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


REFUSED = {
    endless_loop: "it uses the operator 'Loop'",
    branch: "it uses the operator 'If'",
    other_domain: "a node in it has field 7 of ONNX",
    local_function: "a model in it has field 25 of ONNX",
    training: "a model in it has field 20 of ONNX",
    external_data: "a constant in it has field 13 of ONNX",
    sparse_constant: "a graph in it has field 15 of ONNX",
    emptied_input: "a Add in it takes '', which nothing before it gives",
    missing_input: "a Add in it has 1 inputs",
    undeclared: "a Add in it takes 'nowhere', which nothing before it gives",
    too_early: "a Add in it takes 'arm_0', which nothing before it gives",
    doubled_output: "the name 'means' in it stands for two things",
    doubled_constant: "the name 'half' in it stands for two things",
    unnamed_output: "a value in it has no name",
    no_such_output: "nothing in it gives its output 'action'",
    optional_output: "a Add in it has 2 outputs",
    cut_constant: "its constant 'shape' is not as large as its type and shape say",
    vast_constant: "its constant 'shape' is not as large as its type and shape say",
    texts: "its constant 'shape' is not as large as its type and shape say",
    other_attribute: "a Split in it has the attribute 'scales'",
    doubled_attribute: "a Split in it has an attribute twice",
    graph_as_attribute: "a attribute or declaration in it has field 6 of ONNX",
    fewer_outputs: "a Split in it has 2 outputs and says that it has others",
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
        FileError, match=r"repeats a step in another way|different numbers of inputs|a Scan in it has field 8"
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
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *args, **how: asked.append(how) or whole(*args, **how))
    opened(TOY)
    assert [how["disabled_optimizers"] for how in asked] == [["ConstantFolding"]]


# -- what goes in and out


def renamed(old, new):
    def change(model):
        for item in (*model.graph.input, *model.graph.output, *model.graph.node):
            if hasattr(item, "op_type"):
                item.input[:] = [new if name == old else name for name in item.input]
                item.output[:] = [new if name == old else name for name in item.output]
            elif item.name == old:
                item.name = new

    return change


def resized(model):
    model.graph.input[1].type.tensor_type.shape.dim[2].dim_value = 3


def integers(model):
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.INT64, ["batch", 2]))


@pytest.mark.parametrize("change", [renamed("arm", "leg"), renamed("action", "other"), resized])
def test_a_graph_must_have_the_inputs_and_outputs_of_its_header(change):
    model = two_inputs()
    change(model)
    with pytest.raises(FileError, match=r"toy.onnx .*other inputs or outputs than its header tells of|cannot load"):
        opened(hashed(model))


def test_all_that_goes_in_and_out_is_float32():
    model = two_inputs()
    integers(model)
    with pytest.raises(FileError, match="not all that goes in and out of it is float32"):
        opened(hashed(model))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            renamed("noise", "other"),
            {"inputs": {"other": [1, "batch", 1, 3], "arm": ["batch", 2, 2], "ball": ["batch", 2, 1]}},
        ),
        (renamed("action", "other"), {"outputs": {"other": ["batch", 1, 3], "norms": ["rows"]}}),
        (renamed("norms", "other"), {"outputs": {"action": ["batch", 1, 3], "other": ["rows"]}}),
        (None, {"executed": [0, 2]}),
        (None, {"output": "chunk"}),
    ],
)
def test_a_graph_of_another_kind_is_refused(change, said):
    model = two_inputs(**said)
    if change:
        change(model)
    with pytest.raises(FileError, match="it does not turn observations and noise into the actions that its header"):
        opened(hashed(model))


def test_an_export_that_cannot_run_says_so_in_one_sentence():
    model = two_inputs()
    model.graph.node.insert(0, helper.make_node("Reshape", ["noise", "pair"], ["pairs"]))
    model.graph.node[-2].input[0] = "pairs"
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 2]), "pair"))
    policy = opened(hashed(model))  # three numbers a sample, so that it works for even batches only
    with pytest.raises(EngineError, match=r"ONNX Runtime cannot run this .*export it again") as caught:
        policy.predict_action(OBSERVED)
    assert "\n" not in str(caught.value)


# -- the reader


def test_bytes_of_any_kind_are_read_or_refused(exports):
    rng, refused = random.Random(0), []
    bases = [TOY, exports["full"][:6000], exports["schedule"]]
    for index in range(3000):
        data = bytearray(bases[0 if index % 10 else 1 + index % 20 // 10])
        for _ in range(rng.randint(1, 3)):
            position = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[position] ^= 1 << rng.randrange(8)
                case 1:
                    data[position] = rng.choice((0, 1, 127, 128, 255))
                case 2:
                    del data[position:]
                    data += bytes(rng.randrange(256) for _ in range(rng.randrange(20)))
                case 3:
                    data[position:position] = bytes(data[: rng.randrange(30)])
            data = data or bytearray(b"\0")
        for look in (check_model, read_metadata):
            try:
                look(bytes(data))
            except ContentError as error:
                refused.append(len(str(error)))
    assert len(refused) > 2000
    assert max(refused) < 300


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\x0a\x05abc", "ends behind what it is part of"),
        (b"\x0a", "ends behind what it is part of"),
        (b"\x08" + b"\xff" * 11, "more than ten bytes"),
        (b"\x0b\x0a", "wire type 3"),
        (b"\x08\x01" * 20, "more than"),
    ],
)
def test_bytes_that_are_no_message(data, sentence):
    with pytest.raises(ContentError, match=sentence):
        protobuf.read_fields(data, 0, len(data), most=10)


def test_fields_are_read_where_they_lie():
    data = b"\x08\xac\x02" + b"\x12\x03abc" + b"\x1d\0\0\x80\x3f" + b"\xa0\x01\x07"
    fields = protobuf.read_fields(data, 0, len(data))
    assert [(key >> 3, key & 7) for key, _, _ in fields] == [(1, 0), (2, 2), (3, 5), (20, 0)]
    assert fields[0][1] == 300
    assert data[fields[1][1] : fields[1][2]] == b"abc"
    assert data[fields[2][1] : fields[2][2]] == b"\0\0\x80\x3f"
    assert fields[3][1] == 7


def test_the_work_of_a_look_is_bounded(monkeypatch):
    monkeypatch.setattr(graph, "MOST_FIELDS", 50)
    with pytest.raises(ContentError, match="it has more than"):
        check_model(TOY)


def test_the_page_lists_the_operators():
    page = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()
    listed = page.split("Only the operators that blockcache writes, as it writes them: ")[1].split(". Refused")[0]
    words = re.sub(r"\(.*?\)|\bone\b", "", listed).replace("\n", " ").split(",")
    assert sorted(word.strip() for word in words) == sorted(OPERATORS)
