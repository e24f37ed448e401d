"""Files that were written before still load: those in docs, gzipped or not, and those that ship with the packages."""

import json
from importlib import resources
from pathlib import Path

import pytest

from blockcache import load_policy
from blockcache.files import read_json
from blockcache.results.losses import LossModel
from blockcache.results.rollouts import Results
from blockcache.results.stored import Stored
from blockcache.results.timings import Timings
from blockcache.results.tuning import Tuning
from blockcache.samplers import ChosenSampler
from blockcache.schedule import Schedule
from blockcache_lab.pages import guard, performance
from blockcache_lab.studies.distances import FrontierDistances
from blockcache_lab.studies.loss_data import LossData
from repository import ROOT

PLACES = (ROOT / "docs", *(Path(str(resources.files(name) / "assets")) for name in ("blockcache", "blockcache_lab")))
LOADERS = {
    "blockcache.frontier-distances": FrontierDistances.load,
    "blockcache.guard": guard.FORMAT.load,
    "blockcache.loss-model": LossModel.load,
    "blockcache.losses": LossData.load,
    "blockcache.performance": performance.FORMAT.load,
    "blockcache.policy": lambda path: load_policy(path.parent),
    "blockcache.results": Results.load,
    "blockcache.sampler": ChosenSampler.load,
    "blockcache.schedule": Schedule.load,
    "blockcache.stored": Stored.load,
    "blockcache.timings": Timings.load,
    "halving": lambda path: [dict(scores) for scores in read_json(path, "file")["rounds"]],  # of examples/halving.py
    "blockcache.tuning": Tuning.load,
}
PRINTED = {"published_results.json", "published_schedules.json"}  # the paper's, in no format of ours
FILES = sorted(
    path
    for place in PLACES
    for path in (*place.rglob("*.json"), *place.rglob("*.json.gz"))
    if path.name not in PRINTED and "state" not in path.parts
)


def kind(path):
    found = read_json(path, "file").get("format")
    return "blockcache.policy" if path.name == "config.json" else found


def test_there_is_a_file_of_each_kind():
    assert {kind(path) for path in FILES} == set(LOADERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_loads(path):
    LOADERS[kind(path)](path)


def test_files_from_before_made_by_load_and_new_ones_have_it(tmp_path):
    form = performance.FORMAT
    (path,) = [path for path in FILES if kind(path) == form.name]
    old = json.loads(path.read_text())
    form.save(tmp_path / "new.json", form.load(path))
    new = json.loads((tmp_path / "new.json").read_text())
    assert new.pop("made_by").startswith("blockcache ")
    assert new == {key: value for key, value in old.items() if key != "made_by"}
