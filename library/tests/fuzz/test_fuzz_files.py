"""The quick part: some thousand damaged files of every format, always the same ones, and all past offenders."""

import pytest

from .offenders import OFFENDERS
from .running import Plan, Runner
from .samples import SAMPLES

CASES = {"camera-export": 300}  # a file of megabytes
MANY = 2_000


@pytest.fixture(scope="module")
def runner():
    with Runner() as running:
        yield running


def listed(findings):
    return "\n".join(finding.line() for finding in findings[:20])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(runner, name):
    cases = CASES.get(name, MANY)
    outcome = runner.run(Plan(name, 0, 0, cases))
    assert not outcome.findings, listed(outcome.findings)
    # else the harness damages nothing, or reads nothing; of an export every byte counts
    assert outcome.loaded == 0 if name == "export" else 0 < outcome.loaded < cases


@pytest.mark.parametrize("name", SAMPLES)
def test_past_offenders_stay_found(runner, name):
    count = sum(item.format == name for item in OFFENDERS)
    outcome = runner.run(Plan(name, None, 0, count))
    assert not outcome.findings, listed(outcome.findings)
    assert outcome.cases == count > 0
