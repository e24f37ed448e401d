"""Files that were written before, and that each still says what it said: read, written and read again it is the same."""

from functools import partial
from importlib import resources
from pathlib import Path

import torch

from blockcache import load_policy, save_policy
from blockcache.files import read_json
from blockcache.results.losses import LossModel
from blockcache.results.rollouts import Results
from blockcache.results.stored import Stored
from blockcache.results.timings import Timings
from blockcache.results.tuning import Tuning
from blockcache.samplers import ChosenSampler
from blockcache.schedule import Schedule
from repository import DOCS

PRINTED = {"published_results.json", "published_schedules.json"}  # the paper's, in no format of ours


def files(*places):
    found = [path for place in places for path in (*place.rglob("*.json"), *place.rglob("*.json.gz"))]
    return sorted(path for path in found if path.name not in PRINTED and "state" not in path.parts)


def assets(package):
    return Path(str(resources.files(package) / "assets"))


def kind(path):
    found = read_json(path, "file").get("format")
    return "blockcache.policy" if path.name == "config.json" else found


def same_value(of, path, place):
    found = of.load(path)
    found.save(place / "again.json")
    assert of.load(place / "again.json") == found


def same_timings(path, place):
    found = Timings.load(path)
    found.save(place / "again.json")
    assert Timings.load(place / "again.json").content() == found.content()


def same_content(form, path, place):
    """Of a file that is no value of its own."""
    found = form.load(path)
    form.save(place / "again.json", found)
    assert form.load(place / "again.json") == found


def same_policy(path, place):
    found = load_policy(path.parent)
    save_policy(found, place / "again")
    again = load_policy(place / "again")
    assert again.config == found.config
    weights = found.state_dict()
    assert weights.keys() == again.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.state_dict().items())


def rounds_of_scores(path, place):
    """Of examples/halving.py: by round and method, a score for each seed."""
    for scores in read_json(path, "file")["rounds"]:
        assert scores
        assert all(0 <= score <= 1 for of in scores.values() for score in of.values())


KINDS = {
    "blockcache.loss-model": partial(same_value, LossModel),
    "blockcache.policy": same_policy,
    "blockcache.results": partial(same_value, Results),
    "blockcache.sampler": partial(same_value, ChosenSampler),
    "blockcache.schedule": partial(same_value, Schedule),
    "blockcache.stored": partial(same_value, Stored),
    "blockcache.timings": same_timings,
    "blockcache.tuning": partial(same_value, Tuning),
    "halving": rounds_of_scores,
}
"""By the name of a format of the library: its check, which takes the file and a directory to write in."""
FILES = files(DOCS, assets("blockcache"))
