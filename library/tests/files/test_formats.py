"""The one strict way to read a file of ours: what is written comes back, anything else is refused by name."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from blockcache import files
from blockcache.errors import ContentError, FileError, ObservationError
from blockcache.files import Format

JSON_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | JSON_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(JSON_TEXT, inner, max_size=4),
    max_leaves=12,
)
THING = Format("test.thing", "thing", {"updates": dict, "rows": list, "note": str, "count": int, "any": object})
CONTENT = {"updates": {"a": [0, 1, 2]}, "rows": [[1], [2]], "note": "n", "count": 3, "any": None}
OLDER = Format("test.older", "older thing", {"a": object, "b": object}, optional=("made_by", "b"))
BY_HAND = Format("test.hand", "config", {}, optional=("format", "version", "made_by"), others=True)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b'{"a": 1', "is not valid JSON .* may be cut short"),
        (b"\x80\x81\x82", "is not valid JSON"),
        (b"hello", "is not valid JSON"),
        (b"[1, 2]", "holds a JSON list, expected an object"),
        (b"3", "holds a JSON int, expected an object"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"x": {"b": 1, "c": 3, "b": 1}}', "key 'b' appears twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is not valid JSON"),
    ],
)
def test_unreadable_json_is_refused(tmp_path, content, sentence):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=sentence) as caught:
        THING.load(path)
    assert f"the thing {path}" in str(caught.value)


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(FileError, match=r"no thing at .* does not exist"):
        THING.load(tmp_path / "nothing.json")
    with pytest.raises(FileError, match="cannot read the thing"):
        THING.load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, np.float32(1)])
def test_a_value_that_json_lacks_is_refused(tmp_path, value):
    old = tmp_path / "thing.json"
    old.write_bytes(b"old content")
    for write in (THING.save, lambda path, content: THING.save_tensors(path, content, {}, safetensors.numpy.save)):
        with pytest.raises(FileError, match=r"cannot write .*thing\.json: .*; nothing was changed"):
            write(old, CONTENT | {"any": value})
        assert old.read_bytes() == b"old content"


@given(value=st.dictionaries(JSON_TEXT, JSON_VALUE, max_size=5))
def test_every_way_of_keeping_a_content_gives_it_back(tmp_path_factory, value):
    path, content = tmp_path_factory.getbasetemp() / "round-trip", CONTENT | {"updates": value, "any": value}
    THING.save(path, content)
    assert THING.load(path) == content
    assert json.loads(path.read_text()) == THING.header | content
    assert THING.parse(THING.text(content, path), path) == content
    THING.save_tensors(path, content, {"x": np.arange(3.0)}, safetensors.numpy.save)
    found, tensors = THING.load_tensors(path, safetensors.numpy.load)
    assert found == content
    np.testing.assert_array_equal(tensors["x"], [0, 1, 2])


def test_lists_of_numbers_stay_on_one_line(tmp_path):
    THING.save(tmp_path / "x", CONTENT)
    lines = (tmp_path / "x").read_text().splitlines()
    assert '    "a": [0, 1, 2]' in lines
    assert lines[1:4] == [f'  "{key}": {json.dumps(value)},' for key, value in THING.header.items()]


def write_thing(path, changes, gone=()):
    value = {key: item for key, item in (THING.header | CONTENT | changes).items() if key not in gone}
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("version", [2, 0, "1", None, True, 1.0, [1] * 10_000])
def test_other_versions_are_refused(tmp_path, version):
    write_thing(tmp_path / "x", {"version": version})
    with pytest.raises(
        FileError, match=r"format version .* reads version 1; use the blockcache that wrote it"
    ) as caught:
        THING.load(tmp_path / "x")
    assert len(str(caught.value)) < 300


def test_other_formats_are_refused(tmp_path):
    write_thing(tmp_path / "x", {"format": "g"})
    with pytest.raises(FileError, match=r"/x is not a thing: its format is 'g', expected 'test.thing'"):
        THING.load(tmp_path / "x")
    with pytest.raises(FileError, match=r"/x is not an older thing: its format is 'g'"):
        OLDER.load(tmp_path / "x")


@pytest.mark.parametrize("key", ["made_by", *CONTENT])
def test_a_missing_key_is_refused(tmp_path, key):
    write_thing(tmp_path / "x", {}, gone=[key])
    with pytest.raises(FileError, match=f"the thing .*/x is garbled .missing or unknown keys: {key}.; make it again"):
        THING.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"colour": 1, "size": 2}, "missing or unknown keys: colour, size"),
        ({"updates": [1]}, r"it needs an object under 'updates', got \[1\]"),
        ({"updates": None}, "it needs an object under 'updates', got None"),
        ({"rows": {}}, "it needs a list under 'rows', got {}"),
        ({"note": 3}, "it needs a text under 'note', got 3"),
        ({"made_by": None}, "it needs a text under 'made_by'"),
        ({"count": True}, "it needs a whole number under 'count', got True"),
        ({"count": 3.0}, "it needs a whole number under 'count', got 3.0"),
        ({"count": "x" * 10_000}, "it needs a whole number under 'count', got 'xxx"),
    ],
)
def test_another_content_is_refused(tmp_path, changes, sentence):
    write_thing(tmp_path / "x", changes)
    with pytest.raises(FileError, match=f"the thing .*/x is garbled .{sentence}") as caught:
        THING.load(tmp_path / "x")
    assert len(str(caught.value)) < 300
    with pytest.raises(FileError, match=sentence):
        THING.parse((tmp_path / "x").read_text(), "x")


def test_older_files_may_lack_what_their_format_says(tmp_path):
    path = tmp_path / "x"
    for content in ({"a": 1}, {"a": 1, "b": 2}, {"a": 1, "made_by": "me"}):
        path.write_text(json.dumps({"format": "test.older", "version": 1, **content}))
        assert OLDER.load(path) == {key: value for key, value in content.items() if key != "made_by"}
    path.write_text(json.dumps({"format": "test.older", "version": 1, "b": 2}))
    with pytest.raises(FileError, match="unknown keys: a"):
        OLDER.load(path)
    path.write_text(json.dumps({"a": 1}))
    with pytest.raises(FileError, match="its format is None"):
        OLDER.load(path)


def test_a_file_made_by_hand_may_lack_the_whole_header_but_not_half_of_it(tmp_path):
    path = tmp_path / "x"
    for header in ({}, BY_HAND.header, {"made_by": "me"}):
        path.write_text(json.dumps({**header, "any": "thing"}))
        assert BY_HAND.load(path) == {"any": "thing"}
    for header in ({"version": 1}, {"format": "test.hand"}, {"format": "test.other", "version": 1}):
        path.write_text(json.dumps(header))
        with pytest.raises(FileError, match=r"is not a config|format version None"):
            BY_HAND.load(path)


@pytest.mark.parametrize("metadata", [None, {}, {"other": "{}"}, {"blockcache": "{}"}, {"blockcache": "nonsense"}])
def test_tensors_of_somebody_else_are_refused(tmp_path, metadata):
    (tmp_path / "x").write_bytes(safetensors.numpy.save({"x": np.zeros(2)}, metadata=metadata))
    with pytest.raises(FileError, match=r"/x is not a thing: its format is None|thing's header .*/x is not valid JSON"):
        THING.load_tensors(tmp_path / "x", safetensors.numpy.load)


def test_tensors_without_metadata_are_refused_as_such(tmp_path):
    header = b'{"__metadata__":null}'
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(FileError, match=r"/x (is not a thing: its format is None|cannot be read)"):
        THING.load_tensors(tmp_path / "x", safetensors.numpy.load)


@dataclass(frozen=True)
class Pair:
    one: int
    other: int


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: files.read(Pair, {"one": 1}), FileError, "is garbled .missing or unknown keys: other"),
        (lambda: files.read(Pair, [1, 2]), FileError, r"is garbled .it needs an object, got \[1, 2\]"),
        (lambda: {}["colour"], FileError, "is garbled .'colour' is missing.; make it again"),
        (lambda: (3).colour, FileError, "is garbled .*colour"),
        (lambda: [][1], FileError, "is garbled"),
        (lambda: int("x"), FileError, "is garbled"),
        (lambda: files.read_bytes("elsewhere", "weights"), FileError, "^no weights at elsewhere"),
    ],
)
def test_errors_of_a_value_are_said_of_its_file(make, error, sentence):
    with pytest.raises(error, match=sentence) as caught, THING.reading("place/x.json"):
        make()
    assert "place/x.json" in str(caught.value) or "elsewhere" in str(caught.value)


def test_an_error_of_the_value_s_own_keeps_its_kind_and_names_the_file():
    with pytest.raises(ObservationError, match=r"^place/x\.json: no numbers$"), THING.reading("place/x.json"):
        raise ObservationError("no numbers")


def test_keys_are_refused_by_name():
    files.expect_keys(["a", "b"], ["a"], ["b", "c"])
    with pytest.raises(ContentError, match=r"missing or unknown keys: a, d$"):
        files.expect_keys(["b", "d"], ["a"], ["b", "c"])
