"""Work that is kept by digest: whole or not at all, checked when it is read, never an error, bounded."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from blockcache import cache
from blockcache.cache import Cache
from blockcache.errors import FileError
from blockcache.files import digest

KEY = digest(["some", "work"])
THINGS = Cache("a thing", "thing")


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(tmp_path))
    return tmp_path


def write(text):
    return lambda path: path.write_text(text)


def write_directory(text):
    def save(path):
        path.mkdir()
        (path / "file").write_text(text)

    return save


def names(place):
    return sorted(path.name for path in place.iterdir() if path.name != ".lock")


def test_a_digest_is_of_every_part_and_of_their_order():
    values = ([], ["a"], ["a", "b"], ["b", "a"], [["a", "b"]], ["ab"])
    assert len({digest(value) for value in values}) == 6
    assert digest([{"a": 1, "b": 2}, None]) == digest([{"b": 2, "a": 1}, None])
    assert len(KEY) == 64


def test_what_was_put_is_got(place):
    assert THINGS.get(KEY, Path.read_text) is None
    THINGS.put(KEY, write("once"))
    assert THINGS.get(KEY, Path.read_text) == "once"
    assert Cache("another", "other").get(KEY, Path.read_text) is None
    THINGS.put(KEY, write("twice"))
    assert THINGS.get(KEY, Path.read_text) == "twice"
    assert names(place) == [f"{KEY}.thing"]


def test_directories_are_replaced_as_a_whole(place):
    THINGS.put(KEY, write_directory("once"))
    (place / f"{KEY}.thing" / "more").write_text("of the old one")
    THINGS.put(KEY, write_directory("twice"))
    assert THINGS.get(KEY, lambda path: (path / "file").read_text()) == "twice"
    assert names(place / f"{KEY}.thing") == [".seal", "file"]


def _flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["file", ".seal"])
@pytest.mark.parametrize("damage", [_flip, Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_damaged_directory_is_not_there(place, name, damage):
    THINGS.put(KEY, write_directory("once"))
    damage(place / f"{KEY}.thing" / name)
    assert THINGS.get(KEY, lambda path: "of use") is None


def test_a_directory_under_another_digest_or_with_more_in_it_is_not_there(place):
    other = digest(["other", "work"])
    THINGS.put(KEY, write_directory("once"))
    (place / f"{KEY}.thing").rename(place / f"{other}.thing")
    assert THINGS.get(other, lambda path: "of use") is None
    (place / f"{other}.thing").rename(place / f"{KEY}.thing")
    assert THINGS.get(KEY, lambda path: "of use") == "of use"
    (place / f"{KEY}.thing" / "more").write_text("")
    assert THINGS.get(KEY, lambda path: "of use") is None


@pytest.mark.parametrize("error", [FileError("damaged"), ValueError("x"), KeyError("x"), OSError("x")])
def test_what_cannot_be_loaded_is_not_there(error):
    def load(path):
        raise error

    THINGS.put(KEY, write("once"))
    assert THINGS.get(KEY, load) is None
    assert THINGS.get(KEY, lambda path: None) is None


@pytest.mark.parametrize("error", [FileError("no space"), OSError("no space")])
def test_what_cannot_be_saved_leaves_the_old_and_a_warning(place, error, caplog):
    def save(path):
        path.write_text("half")
        raise error

    THINGS.put(KEY, write("once"))
    with caplog.at_level(logging.WARNING, "blockcache"):
        THINGS.put(KEY, save)
    assert caplog.messages == ["a thing cannot be kept for the next time: no space"]
    assert THINGS.get(KEY, Path.read_text) == "once"
    assert names(place) == [f"{KEY}.thing"]


def test_an_error_of_the_program_is_not_hidden(place):
    def save(path):
        path.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        THINGS.put(KEY, save)
    assert names(place) == []


def test_another_process_that_keeps_something_is_waited_for(place, monkeypatch, caplog):
    monkeypatch.setattr(cache, "PATIENCE", 0.05)
    with FileLock(place / ".lock"):
        THINGS.put(KEY, write("once"))
    assert "a thing cannot be kept for the next time" in caplog.text
    assert THINGS.get(KEY, Path.read_text) is None
    THINGS.put(KEY, write("once"))
    assert THINGS.get(KEY, Path.read_text) == "once"


def test_what_a_killed_process_left_is_removed_by_the_next(place):
    program = (
        "import os\n"
        "from blockcache.cache import Cache\n"
        f"Cache('a thing', 'thing').put({KEY!r}, lambda path: (path.write_text('half'), os._exit(9)))\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 9
    (left,) = names(place)
    assert left.startswith(".new-")
    THINGS.put(KEY, write("once"))  # the killed one holds no lock
    assert names(place) == [f"{KEY}.thing"]


def test_what_was_of_no_use_for_longest_goes_first_whatever_its_kind(place, monkeypatch):
    keys = [digest(number) for number in range(4)]
    others = Cache("another", "other")
    for age, key in enumerate(keys[:3]):
        (THINGS if age % 2 else others).put(key, write("x" * 10))
        os.utime(place / f"{key}.{'thing' if age % 2 else 'other'}", (age, age))
    (place / "mine.thing").write_text("not to be touched" * 10)
    assert others.get(keys[0], Path.read_text)  # of use since
    monkeypatch.setattr(cache, "CACHE_BYTES", 25 + len(f'["{keys[3]}", {{"file": "{"0" * 64}"}}]'))  # with its seal
    THINGS.put(keys[3], write_directory("x" * 5))
    assert names(place) == sorted([f"{keys[0]}.other", f"{keys[2]}.other", f"{keys[3]}.thing", "mine.thing"])
