"""Files that were written before still load: the library's in docs, gzipped or not, and those that ship with it.

Those of the laboratory's formats are tested there.
"""

import pytest

from kept_files import FILES, KINDS, kind

OURS = [path for path in FILES if kind(path) in KINDS]


def test_there_is_a_file_of_each_kind():
    assert {kind(path) for path in OURS} == set(KINDS)


@pytest.mark.parametrize("path", OURS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_says_what_it_said(path, tmp_path):
    KINDS[kind(path)](path, tmp_path)
