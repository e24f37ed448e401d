"""Numbers that nobody means, for the laboratory's verbs: one line that names the option, before anything is computed."""

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")
HUGE = "9" * 400
TRAIN = "policy train pusht --data x.npz -o y"
COUNTED = [
    "paper flops --width", "paper flops --layers", "paper flops --tokens", "paper flops --steps", "paper flops --action-dim",
    "paper flops --cond-dim", "paper flops --cond-tokens", f"{TRAIN} --width", f"{TRAIN} --layers", f"{TRAIN} --epochs",
    "analyse pusht --compared", "analyse pusht --episodes",
]  # fmt: skip


@pytest.mark.parametrize("value", [HUGE, str(2**31), "-1", "1.5"])
def test_seeds_that_no_generator_takes(refused, value):
    np.savez("x.npz")
    assert "Invalid value for '--seed'" in refused(*TRAIN.split(), "--seed", value)


@pytest.mark.parametrize("words", COUNTED)
@pytest.mark.parametrize("value", [HUGE, "9" * 5000, "-5", "nan"])
def test_numbers_out_of_range(refused, words, value):
    np.savez("x.npz")
    line = refused(*words.split(), value)
    assert line.startswith("Invalid value for '")
    assert words.split()[-1] in line


def test_flops_are_never_negative(refused, blockcache):
    for option in ("--cond-tokens", "--cond-dim"):
        assert f"Invalid value for '{option}'" in refused("paper", "flops", option, -500)
    assert "-" not in blockcache("paper", "flops", "--cond-dim", 0, "--cond-tokens", 1).replace("----", "")


SOUND = {"keypoint": np.zeros((4, 9, 2)), "state": np.zeros((4, 5)), "action": np.zeros((4, 2)), "episode_ends": [2, 4]}


@pytest.mark.parametrize(
    "changes",
    [
        {"state": np.zeros(4)},
        {"state": np.zeros((3, 5))},
        {"keypoint": np.array("x"), "state": np.array("y")},
        {"keypoint": np.full((4, 9, 2), 1e300)},
        {"action": np.array(3)},
        {"episode_ends": np.array([[1]])},
    ],
    ids=str,
)
def test_malformed_demonstrations_are_one_line(refused, changes):
    np.savez("demos.npz", **SOUND | changes)
    line = refused("policy", "train", "pusht", "--data", "demos.npz", "-o", "policy")
    assert "demos.npz" in line
    assert "should not happen" not in line
