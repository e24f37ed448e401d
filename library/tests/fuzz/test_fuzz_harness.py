"""The harness itself: what it must notice, that a case can be repeated, and that its reference is one."""

import json
import os
import subprocess
import sys

import pytest

from file_formats import EXAMPLES
from repository import ROOT

from . import __main__ as command_line
from . import broken_samples
from .mutations import MUTATIONS
from .quick import undamaged
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
        ("greedy", ("took 3", "took 4")),  # hundred MB, and what else the process took meanwhile
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
    assert undamaged(SAMPLES, EXAMPLES, tmp_path) == []


def test_a_case_is_the_same_file_every_time_and_another_one_with_another_seed(tmp_path):
    whole = {path.name: path.read_bytes() for path in SAMPLES["sampler"].make(tmp_path)}
    cases = [[damaged(Plan("sampler", seed, 0, 50), case, whole) for case in range(50)] for seed in (0, 0, 1)]
    assert cases[0] == cases[1] != cases[2]
    assert all(data != whole[name] for name, data, _ in cases[0])
    assert {name for name, _, _ in cases[0]} == set(whole)
    assert set(MUTATIONS) >= {".json", ".safetensors", ".npz", ".onnx"}


def test_make_fuzz_runs_as_it_is_written_in_the_makefile(tmp_path):
    """With nothing else on the path than what stands there: pytest's own settings would hide what is missing."""
    (recipe,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if " -m fuzz " in line]
    path, interpreter, *words = recipe.split()
    assert (interpreter, words[:3]) == ("$(PYTHON)", ["-m", "fuzz", "--output"])
    few = ["--format", "sampler", "--format", "schedule", "--cases", "30"]
    command = [sys.executable, *words[:3], str(tmp_path / "fuzz.json"), *few]
    environment = {**os.environ, **dict([path.split("=")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "fuzz.json").read_text())
    assert {name: item["cases"] for name, item in found["formats"].items()} == {"sampler": 30, "schedule": 30}
    assert found["findings"] == []


def test_formats_are_run_in_parts_and_every_case_once(monkeypatch):
    monkeypatch.setattr(command_line, "PART", 20)
    found = command_line.all_files(["sampler"], 0, 50)["sampler"]
    with Runner() as runner:
        whole = runner.run(Plan("sampler", 0, 0, 50))
    assert (found["cases"], found["loaded"], found["wrong"]) == (50, whole.loaded, 0)


def test_a_case_that_ends_its_process_is_a_finding_and_the_other_parts_run(monkeypatch, exports_stay_here):
    monkeypatch.setitem(command_line.CHECKS, "caches", broken_samples.dies)
    caches, files = command_line.parts(["sampler", "caches"], 0, 20, 2)
    assert [line.partition(":")[0] for line in caches["caches"]["findings"]] == ["caches"]
    assert files["sampler"]["cases"] == 20
