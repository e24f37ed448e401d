"""The quick part of fuzzing with the laboratory's formats: some thousand damaged files of each, and all past offenders."""

import pytest
from fuzz import all_samples, offenders, samples
from fuzz.quick import check_damaged, check_offenders, undamaged
from fuzz.running import Runner

import file_formats
from laboratory_formats import EXAMPLES
from laboratory_samples import SAMPLES


@pytest.fixture(scope="module")
def runner():
    with Runner("laboratory_samples") as running:
        yield running


@pytest.mark.parametrize("name", SAMPLES)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(runner, name):
    check_damaged(runner, name)


@pytest.mark.parametrize("name", SAMPLES)
def test_past_offenders_stay_found(runner, name):
    check_offenders(runner, name)


def test_every_format_of_the_laboratory_is_damaged(tmp_path, exports_stay_here):
    known = {name for example in file_formats.EXAMPLES for name in example.formats}
    own = [example for example in EXAMPLES if not known.issuperset(example.formats)]
    assert len(own) == 6
    assert undamaged(SAMPLES, own, tmp_path) == []


def test_make_fuzz_damages_the_formats_of_both_houses_and_every_offender_is_of_one():
    assert set(all_samples.SAMPLES) == {*samples.SAMPLES, *SAMPLES}
    assert len(all_samples.SAMPLES) == len(samples.SAMPLES) + len(SAMPLES)
    assert {item.format for item in offenders.OFFENDERS} == set(all_samples.SAMPLES)
