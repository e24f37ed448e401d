"""An export is whole: every byte is hashed, what goes in and out is what its header says, any bytes are read or refused."""

import random
import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from blockcache.errors import ContentError, EngineError, FileError
from blockcache_runtime import graph, protobuf
from blockcache_runtime.graph import check_model, read_metadata
from blockcache_runtime.session import HASH, is_intact
from onnx_files import hashed, metadata, opened, two_inputs

TOY = hashed(two_inputs())
DAMAGED = "the ONNX file toy.onnx was changed or damaged after it was written; export it again"
GARBLED = r"the ONNX file toy.onnx is garbled \(.*\); export it again"
OBSERVED = {"arm": np.ones((1, 2, 2)), "ball": np.ones((1, 2, 1))}


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
        assert list(metadata(model)) == ["blockcache", HASH]
        assert read_metadata(data) == metadata(model)
        assert len(metadata(model)[HASH]) == 64
        assert model.SerializeToString() == data


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
        (renamed("action", "other"), {"outputs": {"other": ["batch", 1, 3], "norms": [1]}}),
        (renamed("norms", "other"), {"outputs": {"action": ["batch", 1, 3], "other": [1]}}),
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
