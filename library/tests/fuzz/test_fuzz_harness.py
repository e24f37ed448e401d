"""The harness itself: what it must notice, that a case can be repeated, and that its reference is one."""

import pytest

from file_formats import EXAMPLES

from .mutations import MUTATIONS
from .running import Plan, Runner, damaged
from .samples import SAMPLES


@pytest.fixture(scope="module")
def runner():
    with Runner(f"{__package__}.broken_samples", seconds=2.0) as running:
        yield running


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("crash", "the process died, exit code -"),
        ("hang", "still not done after 2 s"),
        ("greedy", "took 3"),
        ("raw", "TypeError: unhashable type: 'list' (at broken_samples.py:"),
        ("deep", "RecursionError: too deep"),
        ("talkative", "a message of 5000 characters"),
        ("many lines", "a message of 20 characters in 21 lines"),
    ],
)
def test_whatever_is_wrong_with_a_reader_is_a_finding(runner, name, error):
    found = runner.run(Plan(name, 0, 5, 1)).findings
    assert [finding.case for finding in found] == [5]
    assert found[0].error.startswith(error)
    assert f"{name} 5 (" in found[0].line()


def test_all_cases_are_run_although_some_crash(runner):
    assert len(runner.run(Plan("crash", 0, 0, 3)).findings) == 3


@pytest.mark.parametrize(("name", "loaded"), [("refused", 0), ("taken", 250)])
def test_a_file_that_is_taken_or_refused_is_no_finding(runner, name, loaded):
    outcome = runner.run(Plan(name, 0, 0, 250))
    assert (outcome.cases, outcome.loaded, outcome.findings) == (250, loaded, ())


def test_every_format_of_the_package_is_damaged(tmp_path, exports_stay_here):
    written = b""
    for name, sample in SAMPLES.items():
        (tmp_path / name).mkdir()
        written += b"".join(path.read_bytes() for path in sample.make(tmp_path / name))
    ours = [name for example in EXAMPLES for name in example.formats if name.startswith("blockcache")]
    assert [name for name in ours if name.encode() not in written] == []


def test_a_case_is_the_same_file_every_time_and_another_one_with_another_seed(tmp_path):
    whole = {path.name: path.read_bytes() for path in SAMPLES["sampler"].make(tmp_path)}
    cases = [[damaged(Plan("sampler", seed, 0, 50), case, whole) for case in range(50)] for seed in (0, 0, 1)]
    assert cases[0] == cases[1] != cases[2]
    assert all(data != whole[name] for name, data, _ in cases[0])
    assert {name for name, _, _ in cases[0]} == set(whole)
    assert set(MUTATIONS) >= {".json", ".safetensors", ".npz", ".onnx"}
