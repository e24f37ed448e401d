"""Whole files, all or nothing. The tests may run as root, so failures are made by hand rather than by permissions."""

import errno
import json
import os
import stat
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcache import files
from blockcache.errors import FileError

JSON_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | JSON_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(JSON_TEXT, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "thing.json"
    path.write_bytes(b"old content")
    return path


def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file_whole(old, monkeypatch, function):
    monkeypatch.setattr(os, function, fail)
    with pytest.raises(FileError, match=r"cannot write .*thing\.json: No space left on device; nothing was changed"):
        files.write_bytes(old, b"new")
    assert old.read_bytes() == b"old content"
    assert os.listdir(old.parent) == [old.name]


def test_full_disk_in_the_middle_of_the_data(old, monkeypatch):
    real = os.fdopen

    class HalfFull:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            fail()

    monkeypatch.setattr(os, "fdopen", lambda *args: HalfFull(real(*args)))
    with pytest.raises(FileError, match="No space left"):
        files.write_bytes(old, b"new content, longer than the disk")
    assert old.read_bytes() == b"old content"
    assert os.listdir(old.parent) == [old.name]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's always full device")
def test_really_full_device():
    with pytest.raises(FileError, match="cannot write /dev/full/x"):
        files.write_bytes("/dev/full/x", b"new")


def test_interrupt_leaves_no_half_file(old, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(old, b"new")
    assert old.read_bytes() == b"old content"
    assert os.listdir(old.parent) == [old.name]


def test_parent_that_is_a_file(old):
    with pytest.raises(FileError, match="nothing was changed"):
        files.write_bytes(old / "below.json", b"new")
    assert old.read_bytes() == b"old content"


@pytest.mark.parametrize("name", ["", "."])
def test_target_without_a_name(name):
    with pytest.raises(FileError, match="that is no file's name"):
        files.write_bytes(name, b"new")


def test_target_that_is_a_directory(tmp_path):
    (tmp_path / "place").mkdir()
    with pytest.raises(FileError, match="nothing was changed"):
        files.write_bytes(tmp_path / "place", b"new")
    assert os.listdir(tmp_path) == ["place"]


def test_write_makes_missing_directories(tmp_path):
    files.write_bytes(tmp_path / "a" / "b" / "c", b"x")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"x"


def test_written_file_has_the_usual_rights(tmp_path):
    (tmp_path / "plain").write_bytes(b"x")
    files.write_bytes(tmp_path / "ours", b"x")
    rights = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "ours")]
    assert rights[0] == rights[1]


def test_writers_in_threads_never_mix(tmp_path):
    path = tmp_path / "x"
    contents = [bytes([65 + index]) * 100_000 for index in range(8)]
    threads = [threading.Thread(target=files.write_bytes, args=(path, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["x"]


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
        files.read_json(path, "schedule")
    assert "schedule" in str(caught.value)


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(FileError, match=r"no schedule at .* does not exist"):
        files.read_json(tmp_path / "nothing.json", "schedule")
    with pytest.raises(FileError, match="cannot read the schedule"):
        files.read_json(tmp_path, "schedule")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_a_value_that_json_lacks_is_refused(old, value):
    with pytest.raises(FileError, match="nothing was changed"):
        files.write_json(old, {"a": value})
    assert old.read_bytes() == b"old content"


@given(value=st.dictionaries(JSON_TEXT, JSON_VALUE, max_size=5))
def test_json_round_trip(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    files.write_json(path, value)
    assert files.read_json(path, "thing") == value
    assert json.loads(path.read_text()) == value


def test_lists_of_numbers_stay_on_one_line(tmp_path):
    files.write_json(tmp_path / "x", {"updates": {"a": [0, 1, 2]}, "empty": {}, "rows": [[1], [2]]})
    lines = (tmp_path / "x").read_text().splitlines()
    assert '    "a": [0, 1, 2]' in lines


@pytest.mark.parametrize("version", [2, 0, "1", None, True, 1.0])
def test_other_versions_are_refused(version):
    with pytest.raises(FileError, match=r"format version .* reads version 1; use the blockcache that wrote it"):
        files.expect_format({"format": "f", "version": version}, "f", 1, "schedule", "x.json")


def test_other_formats_are_refused():
    with pytest.raises(FileError, match=r"x\.json is not a schedule: its format is 'g', expected 'f'"):
        files.expect_format({"format": "g", "version": 1}, "f", 1, "schedule", "x.json")
