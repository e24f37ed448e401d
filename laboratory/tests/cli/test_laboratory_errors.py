"""The laboratory's verbs when something is wrong: one line, nothing written, and before anything heavy is imported."""

import json
import os
from pathlib import Path

import pytest

from cli_inputs import answers
from performance_figures import synthetic

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("paper flops --steps 50 square_ph", "the schedule is for 100 steps, the generation has 50"),
        ("paper flops --layers 0", "Invalid value for '--layers'"),
        ("paper flops square_ph --policy policy", "the schedule is for 100 steps, the generation has 20"),
    ],
)
def test_errors_are_one_line(refused, policy_directory, words, sentence):
    before = set(Path().rglob("*"))
    assert sentence in refused(*words.split())
    assert set(Path().rglob("*")) <= before | {Path("cache")}


def test_sizes_beside_a_policy_are_refused(refused, policy_directory):
    line = refused("paper", "flops", "--policy", policy_directory, "--width", 32, "--steps", 5)
    assert line == "--steps, --width and a policy exclude one another: a policy has its own shape"


def test_an_unwritable_place_is_one_line(refused, measured):
    Path("docs/performance-bench.png").mkdir(parents=True)  # a directory in the picture's place
    Path("docs/performance.json").write_text(json.dumps(synthetic(measured)))
    line = refused("paper", "performance", "--render-only", "-o", "docs")
    assert line.startswith("cannot write")
    assert line.endswith("; nothing was changed")


OUTPUTS = [
    "policy demonstrate metaworld-assembly -o",
    "paper results suites --stored",
    "paper frontier suites --stored",
]
DIRECTORIES = [
    "paper suite main pusht -o",
    "paper timing pusht -o",
    "paper performance -o",
    "paper results suites -o",
]


def test_a_place_that_cannot_be_written_is_refused_before_any_work_and_before_torch_is_loaded():
    Path("file").write_text("not a directory")
    Path("place").mkdir()
    none, file = "the directory none does not exist; make it first", "Not a directory; nothing was changed"
    cases = [(f"{verb} none/x.gif", f"none/x.gif: {none}") for verb in OUTPUTS]
    cases += [(f"{verb} file/x.gif", f"file/x.gif: {file}") for verb in OUTPUTS]
    cases += [(f"{verb} place", "place: it is not a regular file; nothing was changed") for verb in OUTPUTS]
    cases += [(f"{verb} file", f"file: {file}") for verb in DIRECTORIES]
    cases += [(f"{verb} none/deep/er", f"none/deep/er: {none}") for verb in DIRECTORIES]
    train = "policy train pusht --data file -o"
    cases += [(f"{train} file/policy", f"file: {file}"), (f"{train} none/deep/er/policy", f"none/deep/er: {none}")]
    assert answers(*(words for words, _ in cases)) == [f"cannot write {sentence}" for _, sentence in cases]
    assert sorted(os.listdir()) == ["file", "place"]


POLICIES = ["paper suite main", "paper timing", "paper flops --policy"]
WRONG = {
    **{f"{verb} nowhere": "no policy 'nowhere': it is neither a directory nor one" for verb in POLICIES},
    **{f"{verb} no_such:thing": "no policy 'no_such:thing': there is no module 'no_such'" for verb in POLICIES},
    **{f"{verb} empty": "no policy config at empty/config.json" for verb in POLICIES},
    "paper flops nowhere --policy pusht": "no schedule 'nowhere'",
    "policy demonstrate psuht -o x.npz": "unknown task 'psuht'",
    "policy demonstrate pusht -o x.npz": "task 'pusht' has no expert of its own",
    "policy train psuht --data broken.json -o x": "unknown task 'psuht'",
    "policy train pusht --data nowhere.npz -o x": "no demonstrations at nowhere.npz: the file does not exist",
    "paper suite mian pusht": "'mian' is not one of",
    "paper suite main mute": "the policy mute does not say which task",
    "paper suite main pusht --quick --rollouts 3": "--rollouts and --quick exclude one another",
    "paper timing mute": "the policy mute does not say which task",
}


def test_wrong_input_is_answered_before_anything_heavy_is_imported():
    Path("empty").mkdir()
    Path("mute").mkdir()
    Path("mute/config.json").write_text("{}")
    Path("broken.json").write_text("{")
    for (words, sentence), answer in zip(WRONG.items(), answers(*WRONG), strict=True):
        assert sentence in answer, words
    assert sorted(os.listdir()) == ["broken.json", "empty", "mute"]
