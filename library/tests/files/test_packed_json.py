"""JSON files that lie there gzipped: read like any other, and never unpacked without a limit."""

import gzip
import tracemalloc

import pytest

from blockcache.errors import FileError
from blockcache.files import JSON_BYTES, exists, read_json
from blockcache.report.overview.sources import load_sources
from blockcache.schedule import Schedule

SCHEDULE = Schedule.every_step(4, ["layers.0.SA", "layers.0.FFN"])


@pytest.fixture
def packed(tmp_path):
    """A schedule that is there in its gzipped form only; the path is the name without .gz."""
    path = tmp_path / "schedule.json"
    SCHEDULE.save(path)
    (tmp_path / "schedule.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return path


def test_a_packed_file_is_read_under_either_name(packed):
    assert exists(packed)
    assert Schedule.load(packed) == SCHEDULE
    assert Schedule.load(f"{packed}.gz") == SCHEDULE


def test_what_is_there_unpacked_counts(packed):
    other = Schedule.every_step(3, ["layers.0.SA"])
    other.save(packed)
    assert Schedule.load(packed) == other


def test_only_json_is_looked_for_in_packed_form(tmp_path):
    (tmp_path / "policy.gz").write_bytes(b"")
    assert not exists(tmp_path / "policy")
    with pytest.raises(FileError, match=r"no schedule at .*nothing\.json: the file does not exist"):
        Schedule.load(tmp_path / "nothing.json")


def test_an_error_in_it_names_the_packed_file(packed):
    place = packed.with_name("schedule.json.gz")
    place.write_bytes(gzip.compress(b'{"format": "another"}'))
    with pytest.raises(FileError, match=r"schedule\.json"):
        Schedule.load(packed)
    place.write_bytes(gzip.compress(b"[1]"))
    with pytest.raises(FileError, match=r"schedule\.json\.gz holds a JSON list"):
        Schedule.load(packed)


def test_a_damaged_one_is_refused_in_one_sentence(packed):
    place = packed.with_name("schedule.json.gz")
    whole = place.read_bytes()
    for damaged in (whole[:-9], whole[:20], whole + b"more", whole + whole):
        place.write_bytes(damaged)
        with pytest.raises(FileError, match="is cut short or has something behind its end; make or copy it again"):
            read_json(packed, "schedule")
    for damaged in (b"no gzip at all", whole[:15] + bytes([whole[15] ^ 255]) + whole[16:], whole[:-8] + bytes(8)):
        place.write_bytes(damaged)
        with pytest.raises(FileError, match=r"(cannot be unpacked \(.*\); it is damaged|is cut short)"):
            read_json(packed, "schedule")


def test_a_bomb_is_not_unpacked(packed):
    place = packed.with_name("schedule.json.gz")
    place.write_bytes(gzip.compress(bytes(JSON_BYTES + 1)))
    with pytest.raises(FileError, match=f"unpacks to more than {JSON_BYTES:,} bytes; is it another file"):
        read_json(packed, "schedule")
    place.write_bytes(gzip.compress(bytes(8 * JSON_BYTES)))
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="unpacks to more than"):
            read_json(packed, "schedule")
        assert tracemalloc.get_traced_memory()[1] < 3 * JSON_BYTES
    finally:
        tracemalloc.stop()


def test_a_directory_of_packed_files_is_reported_on_once(packed, tmp_path):
    found = load_sources({"here": tmp_path})
    assert [source.path for source in found.schedules] == ["here/schedule.json.gz"]
    SCHEDULE.save(packed)
    found = load_sources({"here": tmp_path})
    assert [source.path for source in found.schedules] == ["here/schedule.json"]


def test_what_is_saved_under_a_gzipped_name_is_gzipped_and_the_same_every_time(tmp_path):
    path = tmp_path / "schedule.json.gz"
    SCHEDULE.save(path)
    data = path.read_bytes()
    assert Schedule.load(path) == SCHEDULE
    assert gzip.decompress(data).startswith(b"{\n")
    SCHEDULE.save(path)
    assert path.read_bytes() == data
