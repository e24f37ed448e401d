"""The file of an analysis: what comes back, what is refused, and what a page may read off it without torch."""

import json
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

import pages
from blockcache.errors import FileError
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.analysis.section import AnalysisError, arrays_of
from blockcache_lab.analysis.sections import SECTIONS, Caching, Response, Similarity
from file_formats import safetensors_with
from toy_analysis import BLOCKS, STEPS, caching, similarity, toy_analysis


def test_every_section_comes_back_as_it_was(tmp_path):
    made = toy_analysis(absent={}, without=("weights",))
    made.save(tmp_path / "a.safetensors")
    found = Analysis.load(tmp_path / "a.safetensors")
    assert list(found.sections) == [name for name in SECTIONS if name != "weights"]
    for name in ("source", "fingerprint", "blocks", "setting", "schedules", "absent", "seconds"):
        assert getattr(found, name) == getattr(made, name)
    for name, section in found.sections.items():
        for item in fields(section):
            one, other = getattr(section, item.name), getattr(made.sections[name], item.name)
            if item.name in arrays_of(type(section)):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
            else:
                assert one == other


def test_all_sections_are_in_the_toy_and_on_the_page_of_the_format():
    page = pages.section("docs/file-formats.md", "## Analysis")
    assert set(toy_analysis().sections) == set(SECTIONS)
    for name, section in SECTIONS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        for item in fields(section):
            assert f"`{item.name}`" in row, (name, item.name)


def test_a_section_of_another_policy_is_refused():
    with pytest.raises(
        AnalysisError, match="section similarity is not of this policy, which has 6 blocks and 24 steps"
    ):
        toy_analysis(sections={"similarity": Similarity((1,), np.ones((6, 5, 5)))})
    with pytest.raises(AnalysisError, match="blocks and steps must be the fingerprint's"):
        toy_analysis(blocks=BLOCKS[:-1])
    with pytest.raises(AnalysisError, match="both there and missing"):
        toy_analysis(absent={"caching": "no"})
    with pytest.raises(AnalysisError, match="no section 'nonsense', known are similarity, caching"):
        toy_analysis(absent={"nonsense": "no"})


def test_arrays_of_another_shape_type_or_with_nan_are_refused():
    with pytest.raises(AnalysisError, match=r"the similarity's cosine has shape \(6, 24, 5\), expected"):
        Similarity((1,), np.ones((6, STEPS, 5)))
    with pytest.raises(AnalysisError, match="a lag must be from 1 to 23, got 24"):
        Similarity((24,), similarity().cosine)
    found = caching()
    with pytest.raises(AnalysisError, match="schedules=3"):
        Caching(found.schedules[:3], found.errors, found.updates)
    with pytest.raises(AnalysisError, match="updates holds float64, expected bool"):
        replace(found, updates=found.updates.astype(float))
    with pytest.raises(AnalysisError, match="holds NaN"):
        replace(found, errors=found.errors * np.nan)
    with pytest.raises(AnalysisError, match="computed at step 0"):
        replace(found, updates=np.zeros_like(found.updates))
    with pytest.raises(AnalysisError, match="two or more different sizes"):
        Response("x", 0, np.ones(3), np.ones(3), np.ones(3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda head: head["sections"].update(nonsense={}), "no section 'nonsense'"),
        (lambda head: head["sections"].pop("caching"), "missing or unknown keys"),
        (lambda head: head["sections"]["caching"].pop("schedules"), "schedules"),
        (lambda head: head.update(version=2), "format version 2, this blockcache reads version 1"),
        (lambda head: head["blocks"].pop(), "fingerprint's"),
    ],
)
def test_a_changed_header_is_refused(tmp_path, change, said):
    path = tmp_path / "a.safetensors"
    toy_analysis().save(path)

    def within(header):
        head = json.loads(header["__metadata__"]["blockcache"])
        change(head)
        return {**header, "__metadata__": {"blockcache": json.dumps(head)}}

    path.write_bytes(safetensors_with(path.read_bytes(), within))
    with pytest.raises((FileError, AnalysisError), match=said):
        Analysis.load(path)


def test_the_file_is_read_without_torch(tmp_path):
    toy_analysis().save(tmp_path / "a.safetensors")
    code = (
        "import sys\n"
        "from blockcache_lab.analysis.file import Analysis\n"
        "from blockcache_lab.analysis.claims import claims\n"
        "print(len(claims(Analysis.load(sys.argv[1]))), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.safetensors")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["13", "False"]
