"""The printed schedules as values."""

import json
from importlib import resources

import pytest

import blockcache as bc
from blockcache.errors import ScheduleError

PRINTED = json.loads(resources.files("blockcache").joinpath("assets", "published_schedules.json").read_text("utf-8"))
CORRECTED = {"can_ph": ["layers.6.SA"], "tool_hang_ph": ["layers.1.FFN"]}


def test_there_are_twelve():
    assert len(bc.published_names()) == 12


@pytest.mark.parametrize("name", bc.published_names())
def test_as_printed_except_for_the_misprints(name):
    schedule, printed = bc.published_schedule(name), PRINTED["tasks"][name]
    assert schedule.steps == 100
    assert len(schedule.blocks) == 24
    wrong = [
        block
        for block, steps in schedule.updates.items()
        if set(steps) != {*printed["acs"][block], *printed["added"].get(block, ())}
    ]
    assert wrong == CORRECTED.get(name, [])
    assert list(schedule.origin["misprints_corrected"]) == wrong


@pytest.mark.parametrize("name", bc.published_names())
def test_before_the_union(name):
    schedule = bc.published_schedule(name, union=False)
    assert {block: list(steps) for block, steps in schedule.updates.items()} == PRINTED["tasks"][name]["acs"]
    assert {len(steps) for steps in schedule.updates.values()} == {10}
    assert schedule.origin["method"] == "blockwise"


def test_binds_family_blocks_and_steps_only():
    fingerprint = bc.published_schedule("square_ph").fingerprint
    assert fingerprint.family == "dp-t"
    assert fingerprint.steps == 100
    assert len(fingerprint.blocks) == 24
    assert (fingerprint.widths, fingerprint.sampler, fingerprint.weights) == (None, None, None)


def test_survives_a_file(tmp_path):
    schedule = bc.published_schedule("can_ph")
    schedule.save(tmp_path / "s.json")
    assert bc.Schedule.load(tmp_path / "s.json") == schedule


def test_unknown_name():
    with pytest.raises(ScheduleError, match=r"no published schedule 'square', known are can_ph, .*"):
        bc.published_schedule("square")
