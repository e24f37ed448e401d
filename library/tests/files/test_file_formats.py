"""No file that the library reads, however it was changed, ends in anything but a value or a short sentence."""

import pytest

import blockcache
import blockcache_runtime
from damaged_files import formats, large, try_a_terabyte, try_changes, try_what_is_no_file
from file_formats import EXAMPLES


def test_every_format_is_among_the_examples():
    assert set(formats(blockcache_runtime, blockcache)) == {name for example in EXAMPLES for name in example.formats}


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.name)
def example(request, tmp_path, exports_stay_here):
    request.param.load(request.param.write(tmp_path))
    return request.param


def test_changed_files_load_or_are_refused_with_a_short_sentence(example, tmp_path):
    try_changes(example, tmp_path)


@pytest.mark.parametrize("example", large(EXAMPLES), ids=lambda item: item.name, indirect=True)
def test_a_file_far_too_large_is_refused_at_once(example, tmp_path):
    try_a_terabyte(example, tmp_path)


def test_what_is_no_file_is_refused_at_once(example, tmp_path):
    try_what_is_no_file(example, tmp_path)
