"""Numbers that nobody means: one line that names the option, before anything is computed."""

import pytest

from blockcache import cli
from cli_inputs import SMALL

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")
HUGE = "9" * 400
RANDOM = [
    "calibrate pusht",
    "policy observe pusht",
    "eval pusht",
    "check pusht",
]
SEEDS = ["--seed", "--first-seed", "--first-seed", "--seed"]
COUNTED = [
    "calibrate pusht --generations", "solve x -S", "solve x -n", "bench --width", "bench --layers", "bench --horizon",
    "bench --steps", "bench --batch", "bench --repeats", "eval pusht --rollouts", "eval pusht --group",
    "eval pusht --repeats", "demo --repeats", "demo --seconds", "policy observe pusht --episodes",
    "policy observe pusht --count", "policy place pusht --steps", "check pusht --count", "check pusht --samples",
]  # fmt: skip
PARALLEL = ["calibrate pusht --threads", "eval pusht --workers", "bench --threads", "policy fit pusht --threads"]


@pytest.mark.parametrize(("verb", "option"), list(zip(RANDOM, SEEDS, strict=True)))
@pytest.mark.parametrize("value", [HUGE, str(2**31), "-1", "1.5"])
def test_seeds_that_no_generator_takes(refused, verb, option, value):
    assert f"Invalid value for '{option}'" in refused(*verb.split(), option, value)


@pytest.mark.parametrize("words", COUNTED + PARALLEL)
@pytest.mark.parametrize("value", [HUGE, "9" * 5000, "-5", "nan"])
def test_numbers_out_of_range(refused, words, value):
    line = refused(*words.split(), value)
    assert line.startswith("Invalid value for '")
    assert words.split()[-1] in line


@pytest.mark.parametrize("words", PARALLEL)
def test_threads_that_no_machine_has(refused, words):
    """A hundred million of them used to end the process."""
    assert "is not in the range 1<=x<=1024" in refused(*words.split(), 10**8)


@pytest.mark.parametrize("method", [f"ddim-{'9' * 5000}", f"bac:S={'9' * 5000}", f"bac:n={HUGE}", f"fitted-{HUGE}"])
def test_methods_with_numbers_of_too_many_digits(refused, policy_directory, method):
    line = refused("eval", policy_directory, "--task", "pusht", "-m", method)
    assert "method" in line
    assert "should not happen" not in line


@pytest.mark.parametrize(
    "error", [MemoryError("Unable to allocate 7.28 TiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")]
)
def test_too_little_memory_is_said_as_such(refused, monkeypatch, error):
    def raise_it(*_):
        raise error

    monkeypatch.setattr("blockcache.models.dpt.policy.Shape.policy", raise_it)
    assert refused("bench", *SMALL) == "this machine has not enough memory for that; ask for less"
    with pytest.raises(type(error)):
        cli.main(["bench", *SMALL, "--debug"])
