"""The quick part: some thousand damaged files of each of the library's formats, always the same, and all past offenders."""

import pytest

from .quick import check_damaged, check_offenders
from .running import Runner
from .samples import SAMPLES


@pytest.fixture(scope="module")
def runner():
    with Runner() as running:
        yield running


@pytest.mark.parametrize("name", SAMPLES)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(runner, name):
    check_damaged(runner, name)


@pytest.mark.parametrize("name", SAMPLES)
def test_past_offenders_stay_found(runner, name):
    check_offenders(runner, name)
