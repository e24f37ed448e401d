"""The authors' schedules, one pickled list for each block, as one file of ours."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import blockcache as bc
from blockcache.errors import BlockcacheError
from blockcache.schedule.authors import read_authors_schedule

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")

PRINTED = bc.published_schedule("square_ph", union=False)
MODULES = {"SA": "dropout1", "CA": "dropout2", "FFN": "dropout3"}


def write(rows=None, folder="steps", updates=10, metric="cosine", apart=True, kind=np.int64, protocol=None):
    """Their files: the first step is Python's number and the others are numpy's, as their solver leaves them."""
    for name, steps in (PRINTED.updates if rows is None else rows).items():
        _, layer, block = name.split(".")
        module = f"decoder.layers.{layer}.{MODULES[block]}"
        place = Path(folder) / module if apart else Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        value = [*steps[:1], *map(kind, steps[1:])]
        (place / f"optimal_steps_{module}_{updates}_{metric}.pkl").write_bytes(pickle.dumps(value, protocol))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint64])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_the_lists_become_one_schedule(apart, kind, protocol):
    write(apart=apart, kind=kind, protocol=protocol)
    found = read_authors_schedule("steps")
    assert found.updates == PRINTED.updates
    assert found.blocks == PRINTED.blocks
    assert (found.steps, found.fingerprint) == (100, PRINTED.fingerprint)
    assert found.origin["updates"] == 10
    assert found.origin["metric"] == "cosine"


def test_other_modules_and_other_files_are_left_aside():
    write()
    for module in ("decoder.layers.0", "decoder.layers.0.dropout", "decoder.layers.0.self_attn.out_proj", "encoder.0"):
        place = Path("steps", module)
        place.mkdir()
        (place / f"optimal_steps_{module}_10_cosine.pkl").write_bytes(b"nobody reads this")
    for name in ("optimal_steps_decoder.layers.0.dropout1_10_cosine.json", "similarity_matrices.pkl"):
        Path("steps", name).write_bytes(b"nor this")
    assert read_authors_schedule("steps").updates == PRINTED.updates


def test_one_of_several_is_chosen():
    write()
    write(updates=5, metric="l1", rows={name: [0, 50] for name in PRINTED.blocks})
    with pytest.raises(BlockcacheError, match=r"several schedules \(S=10 by cosine, S=5 by l1\); choose one"):
        read_authors_schedule("steps")
    assert read_authors_schedule("steps", updates=10).updates == PRINTED.updates
    assert read_authors_schedule("steps", metric="l1").updates["layers.0.SA"] == (0, 50)
    with pytest.raises(BlockcacheError, match="has no authors' schedule, S = 5, metric cosine: expected files such as"):
        read_authors_schedule("steps", updates=5, metric="cosine")


def test_the_last_step_and_blocks_without_steps():
    """As their code runs them: every block at the last step, and one without steps at each."""
    write({**PRINTED.updates, "layers.0.CA": []})
    found = read_authors_schedule("steps", last=True)
    assert found.updates["layers.0.SA"] == (*PRINTED.updates["layers.0.SA"], 99)
    assert found.updates["layers.0.CA"] == tuple(range(100))
    assert read_authors_schedule("steps").updates["layers.0.SA"] == PRINTED.updates["layers.0.SA"]


def hostile():
    class Harm:
        def __reduce__(self):
            return os.system, ("touch ran",)

    write()
    file = next(Path("steps").rglob("*.pkl"))
    file.write_bytes(pickle.dumps([0, Harm()]))


def one(value):
    def change():
        write()
        next(Path("steps").rglob("*dropout1_10_cosine.pkl")).write_bytes(value)

    return change


def gone():
    write()
    for file in Path("steps").rglob("*layers.3.dropout[12]*.pkl"):
        file.unlink()


def twice():
    write()
    write(apart=False)


REFUSED = {
    "hostile": (hostile, "would run posix.system"),
    "nothing": (lambda: Path("steps").mkdir(), "has no authors' schedule: expected files such as"),
    "garbled": (one(b"x"), "is garbled"),
    "empty": (one(b""), "is empty"),
    "no list": (one(pickle.dumps({"steps": [0]})), "expected a list of steps"),
    "array": (one(pickle.dumps(np.arange(3))), r"holds numpy\S*_reconstruct, expected a list of steps"),
    "texts": (one(pickle.dumps([0, "1"])), "holds '1' for a step"),
    "fractions": (one(pickle.dumps([0, np.float64(1)])), "for a step, expected a whole number"),
    "negative": (one(pickle.dumps([0, np.int64(-3)])), "for a step, expected a whole number"),
    "beyond the end": (one(pickle.dumps([0, 100])), "update step 100 is out of range"),
    "not from the start": (one(pickle.dumps([3, 5])), "the first update step must be 0"),
    "gone": (gone, r"lacks the steps of decoder.layers.3.dropout1, decoder.layers.3.dropout2$"),
    "twice": (twice, "has two schedules of decoder.layers.0.dropout1"),
}


@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_leaves_nothing(make, sentence, refused):
    make()
    with pytest.raises(BlockcacheError, match=sentence):
        read_authors_schedule("steps")
    assert refused("policy", "convert", "steps", "out.json")
    assert not Path("out.json").exists()
    assert not Path("ran").exists()


def test_the_verb_writes_a_schedule_file(blockcache, refused):
    write()
    assert blockcache("policy", "convert", "steps", "out.json") == "out.json: 24 blocks x 100 steps, 90.0% reused\n"
    assert bc.Schedule.load("out.json").updates == PRINTED.updates
    assert "out.json is there already" in refused("policy", "convert", "steps", "out.json")
    blockcache("policy", "convert", "steps", "more.json", "--last", "--steps", 120, "-S", 10, "--metric", "cosine")
    assert bc.Schedule.load("more.json").updates["layers.0.SA"][-1] == 119
    assert "no schedule" not in blockcache("show", "more.json")
