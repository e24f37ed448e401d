"""Whole files, all or nothing, in places that are checked first. The tests may run as root, so failures are made by hand
rather than by permissions."""

import os
import re
import stat
import threading

import pytest

from blockcache import files
from blockcache.errors import FileError
from disk import full_disk


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "thing.json"
    path.write_bytes(b"old content")
    return path


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file_whole(old, monkeypatch, function):
    monkeypatch.setattr(os, function, full_disk)
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
            full_disk()

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


@pytest.mark.parametrize("function", [lambda path: files.write_bytes(path, b"x"), files.check_writable])
def test_a_missing_directory_is_not_made_in_silence(tmp_path, function):
    sentence = f"cannot write {tmp_path}/a/b: the directory {tmp_path}/a does not exist; make it first"
    with pytest.raises(FileError, match=re.escape(sentence)):
        function(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("function", [lambda path: files.write_bytes(path, b"x"), files.check_writable])
def test_a_pipe_is_not_replaced_by_a_file(tmp_path, function):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match=r"cannot write .*/pipe: it is not a regular file; nothing was changed"):
        function(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_check_leaves_no_trace(old):
    files.check_writable(old)
    files.check_writable(old.parent / "new")
    for name in (".", "new", "new/deeper"):
        files.check_writable(old.parent / name, directory=True)
    assert old.read_bytes() == b"old content"
    assert os.listdir(old.parent) == [old.name]


@pytest.mark.parametrize(
    ("name", "directory", "sentence"),
    [
        ("", False, "cannot write '': that is no file's name"),
        (".", False, "cannot write '.': that is no file's name"),
        ("place", False, "cannot write place: it is not a regular file; nothing was changed"),
        ("thing.json/x", False, "cannot write thing.json/x: Not a directory; nothing was changed"),
        ("x" * 300, False, "File name too long; nothing was changed"),
        ("thing.json", True, "cannot write thing.json: Not a directory; nothing was changed"),
        ("thing.json/x/y", True, "cannot write thing.json/x/y: Not a directory; nothing was changed"),
        ("a/b/c", True, "cannot write a/b/c: the directory a does not exist; make it first"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(old, monkeypatch, name, directory, sentence):
    monkeypatch.chdir(old.parent)
    (old.parent / "place").mkdir()
    with pytest.raises(FileError, match=re.escape(sentence)):
        files.check_writable(name, directory=directory)
    assert sorted(os.listdir()) == ["place", "thing.json"]
    if directory:
        with pytest.raises(FileError, match=f"cannot write {name}: .*; nothing was changed"):
            files.make_directory(name)


@pytest.mark.parametrize("directory", [False, True])
def test_a_read_only_or_full_place_is_refused_before_the_work(old, monkeypatch, directory):
    monkeypatch.setattr(os, "open", full_disk)
    with pytest.raises(FileError, match=r"cannot write .*: No space left on device; nothing was changed"):
        files.check_writable(old.parent if directory else old, directory=directory)


def test_an_output_directory_is_made_with_one_parent_at_most(tmp_path):
    for _ in range(2):
        files.make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(FileError, match=r"cannot write .*/x/y/z"):
        files.make_directory(tmp_path / "x" / "y" / "z")
    assert os.listdir(tmp_path) == ["a"]


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
