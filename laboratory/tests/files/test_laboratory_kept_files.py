"""Files that were written before still load: those in docs of the laboratory's formats, and all that ship with it."""

import json
from functools import partial

import pytest

import kept_files
from blockcache_lab.pages import guard, performance
from blockcache_lab.studies.distances import FrontierDistances
from blockcache_lab.studies.loss_data import LossData
from kept_files import assets, files, kind, same_content, same_value

KINDS = {
    "blockcache.frontier-distances": partial(same_value, FrontierDistances),
    "blockcache.guard": partial(same_content, guard.FORMAT),
    "blockcache.losses": partial(same_value, LossData),
    "blockcache.performance": partial(same_content, performance.FORMAT),
}
ALL = {**kept_files.KINDS, **KINDS}
FILES = [path for path in kept_files.FILES if kind(path) not in kept_files.KINDS] + files(assets("blockcache_lab"))


def test_there_is_a_file_of_each_kind_and_none_of_any_other():
    assert {kind(path) for path in FILES} >= set(KINDS)
    assert {kind(path) for path in (*FILES, *kept_files.FILES)} == set(ALL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_says_what_it_said(path, tmp_path):
    ALL[kind(path)](path, tmp_path)


def test_files_from_before_made_by_load_and_new_ones_have_it(tmp_path):
    form = performance.FORMAT
    (path,) = [path for path in FILES if kind(path) == form.name]
    old = json.loads(path.read_text())
    form.save(tmp_path / "new.json", form.load(path))
    new = json.loads((tmp_path / "new.json").read_text())
    assert new.pop("made_by").startswith("blockcache ")
    assert new == {key: value for key, value in old.items() if key != "made_by"}
