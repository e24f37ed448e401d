"""Schedules: what is refused, and that saving loses nothing."""

import copy
import errno
import json
import os
import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcache import Fingerprint, Schedule
from blockcache.errors import FileError, ScheduleError

BLOCKS = ("layers.0.SA", "layers.0.CA", "layers.0.FFN")


def simple(**changes):
    value = {
        "format": "blockcache.schedule",
        "version": 1,
        "made_by": "a test",
        "steps": 10,
        "updates": {"layers.0.SA": [0, 3], "layers.0.FFN": [0, 5, 9]},
        "fingerprint": Fingerprint().to_dict(),
        "origin": {"method": "by hand"},
    }
    return {**value, **changes}


@st.composite
def schedules(draw):
    steps = draw(st.integers(1, 60))
    names = draw(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200), min_size=1, unique=True)
    )
    later = st.frozensets(st.integers(1, steps - 1)) if steps > 1 else st.just(frozenset())
    updates = {name: (0, *sorted(draw(later))) for name in names}
    fingerprint = Fingerprint(
        family=draw(st.none() | st.just("dp-t")),
        widths=draw(st.none() | st.just({"width": 16})),
        sampler=draw(st.none() | st.just({"type": "ddpm", "eta": 0.5})),
        weights=draw(st.none() | st.text("0123456789abcdef", min_size=64, max_size=64)),
    )
    return Schedule(
        steps, updates, fingerprint, draw(st.dictionaries(st.sampled_from("abc"), st.integers(-(2**64) + 1, 2**64 - 1)))
    )


@given(schedule=schedules())
def test_save_and_load_give_an_equal_schedule(tmp_path_factory, schedule):
    path = tmp_path_factory.getbasetemp() / "schedule.json"
    schedule.save(path)
    loaded = Schedule.load(path)
    assert loaded == schedule
    assert list(loaded.updates) == list(schedule.updates)  # mappings are equal in any order; ours has a meaning
    assert all(type(step) is int for steps in loaded.updates.values() for step in steps)


def test_the_file_says_what_it_is(tmp_path):
    Schedule(10, {"a": [0]}).save(tmp_path / "s.json")
    value = json.loads((tmp_path / "s.json").read_text())
    assert value["format"] == "blockcache.schedule"
    assert value["version"] == 1
    assert value["made_by"].startswith("blockcache ")


@pytest.mark.parametrize(
    ("updates", "sentence"),
    [
        ([0, 10], "layers.0.SA: update step 10 is out of range, the last of 10 steps is 9"),
        ([0, 3, 99], "out of range"),
        ([-1, 0], "the first update step must be 0, got -1"),
        ([1, 2], "the first update step must be 0, got 1"),
        ([], "the first update step must be 0, got no steps"),
        ([0, 5, 3], "update steps must rise, got 3 after 5"),
        ([0, 3, 3], "update step 3 appears twice"),
        ([0, 0], "update step 0 appears twice"),
        ([0, 3.0], "must be whole numbers, got 3.0"),
        ([0.0], "must be whole numbers, got 0.0"),
        ([0, True], "must be whole numbers, got True"),
        ([False], "must be whole numbers, got False"),
        ([0, "3"], "must be whole numbers, got '3'"),
        ([0, None], "must be whole numbers"),
        ("012", "must be a list of whole numbers"),
        (7, "must be a list of whole numbers"),
        ({0: 1}, "must be a list of whole numbers"),
    ],
)
def test_wrong_steps_are_refused(tmp_path, updates, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        Schedule(10, {"layers.0.SA": updates})
    if isinstance(updates, dict):
        return
    path = tmp_path / "s.json"
    path.write_text(json.dumps(simple(updates={"layers.0.SA": updates})))
    with pytest.raises(ScheduleError, match=sentence) as caught:
        Schedule.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "10", None])
def test_wrong_number_of_steps_is_refused(steps):
    with pytest.raises(ScheduleError, match="positive whole number of steps"):
        Schedule(steps, {"a": [0]})


@pytest.mark.parametrize("name", ["", 3, None])
def test_wrong_block_names_are_refused(name):
    with pytest.raises(ScheduleError, match="a block's name must be a text"):
        Schedule(10, {name: [0]})


def test_no_blocks_are_refused():
    with pytest.raises(ScheduleError, match="at least one block"):
        Schedule(10, {})


@pytest.mark.parametrize("bound", [Fingerprint(steps=20), Fingerprint(blocks=("b",))])
def test_a_fingerprint_of_something_else_is_refused(bound):
    with pytest.raises(ScheduleError, match="differ from those of its fingerprint"):
        Schedule(10, {"a": [0]}, bound)


def test_the_fingerprint_always_binds_blocks_and_steps():
    fingerprint = Schedule(10, {"a": [0], "b": [0]}).fingerprint
    assert (fingerprint.blocks, fingerprint.steps) == (("a", "b"), 10)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"version": 2}, FileError, "format version 2, this blockcache reads version 1"),
        ({"version": "1"}, FileError, "format version '1'"),
        (
            {"format": "blockcache.recording"},
            FileError,
            "is not a schedule: its format is 'blockcache.recording'",
        ),
        ({"colour": "red"}, FileError, "missing or unknown keys: colour"),
        ({"updates": [0, 1]}, FileError, "needs an object under 'updates'"),
        ({"updates": None}, FileError, "needs an object under 'updates'"),
        ({"origin": 3}, FileError, "needs an object under 'origin'"),
        ({"updates": {}}, ScheduleError, "at least one block"),
        ({"steps": "10"}, ScheduleError, "positive whole number of steps"),
        ({"steps": 5}, ScheduleError, "out of range"),
        (
            {"fingerprint": {"steps": 10}},
            FileError,
            "the schedule .* is garbled .missing or unknown keys under 'fingerprint': blocks",
        ),
        (
            {"fingerprint": {**Fingerprint().to_dict(), "steps": 11}},
            ScheduleError,
            "differ from those of its fingerprint",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, changes, error, sentence):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(simple(**changes)))
    with pytest.raises(error, match=sentence) as caught:
        Schedule.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("key", simple())
def test_a_missing_key_is_refused(tmp_path, key):
    value = simple()
    del value[key]
    (tmp_path / "s.json").write_text(json.dumps(value))
    with pytest.raises(FileError, match=key):
        Schedule.load(tmp_path / "s.json")


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(simple()))
    Schedule.load(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"is empty|cut short"):
            Schedule.load(path)


def test_a_failed_save_keeps_the_old_schedule(tmp_path, monkeypatch):
    old, new = Schedule(10, {"a": [0]}), Schedule(10, {"a": [0, 5]})
    old.save(tmp_path / "s.json")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space left on device"):
        new.save(tmp_path / "s.json")
    assert Schedule.load(tmp_path / "s.json") == old
    assert os.listdir(tmp_path) == ["s.json"]


def test_an_unwritable_path(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(FileError, match="cannot write"):
        Schedule(10, {"a": [0]}).save(tmp_path / "file" / "s.json")


def test_frozen():
    given_updates = {"a": [0, 5]}
    schedule = Schedule(10, given_updates, origin={"method": "x"})
    given_updates["a"].append(7)
    given_updates["b"] = [0]
    assert schedule.updates == {"a": (0, 5)}
    with pytest.raises(FrozenInstanceError):
        schedule.steps = 20
    with pytest.raises(TypeError):
        schedule.updates["a"] = (0,)
    with pytest.raises(TypeError):
        schedule.origin["method"] = "y"


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_are_equal(clone):
    schedule = Schedule(10, {name: [0, 5] for name in BLOCKS}, Fingerprint(family="dp-t"), {"method": "x"})
    assert schedule.update_sets["layers.0.SA"] == {0, 5}
    assert clone(schedule) == schedule


def test_counts():
    schedule = Schedule(10, {"a": [0], "b": [0, 1, 2, 3]})
    assert schedule.computed == 5
    assert schedule.reused_share == 0.75
    assert schedule.blocks == ("a", "b")


def test_every_step_reuses_nothing():
    schedule = Schedule.every_step(4, ["a", "b"])
    assert schedule.updates == {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}
    assert schedule.reused_share == 0.0
