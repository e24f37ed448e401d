"""The quick part, for the formats of any house: some thousand damaged files of each, and all past offenders."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .offenders import OFFENDERS
from .running import Finding, Plan, Runner, Sample

CASES = {"camera-export": 300}  # a file of megabytes
MANY = 2_000


def listed(findings: Iterable[Finding]) -> str:
    return "\n".join(finding.line() for finding in [*findings][:20])


def check_damaged(runner: Runner, name: str) -> None:
    cases = CASES.get(name, MANY)
    outcome = runner.run(Plan(name, 0, 0, cases))
    assert not outcome.findings, listed(outcome.findings)
    # else the harness damages nothing, or reads nothing; of an export every byte counts
    assert outcome.loaded == 0 if name == "export" else 0 < outcome.loaded < cases


def check_offenders(runner: Runner, name: str) -> None:
    count = sum(item.format == name for item in OFFENDERS)
    outcome = runner.run(Plan(name, None, 0, count))
    assert not outcome.findings, listed(outcome.findings)
    assert outcome.cases == count > 0


def undamaged(samples: Mapping[str, Sample], examples: Iterable[Any], place: Path) -> list[str]:
    """Formats of the package that are among the examples of all tests and in no sample."""
    written = b""
    for name, sample in samples.items():
        (place / name).mkdir()
        written += b"".join(map(_unpacked, sample.make(place / name)))
    ours = [name for example in examples for name in example.formats if name.startswith("blockcache")]
    return [name for name in ours if name.encode() not in written]


def _unpacked(path: Path) -> bytes:
    """What a file holds; arrays are compressed."""
    if path.suffix != ".npz":
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return b"".join(map(archive.read, archive.namelist()))
