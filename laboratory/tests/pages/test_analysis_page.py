"""`blockcache report` with files that the laboratory reads, and with the library's where a command is the laboratory's."""

import re

import pytest

import file_formats
import laboratory_formats
from blockcache.report.markdown import render as markdown
from blockcache.report.overview.page import page
from blockcache.report.overview.sources import Source, Sources
from blockcache_lab.analysis.claims import claims
from blockcache_lab.pages.analysis import brought
from pages import parse
from read_pages import Reader, chart_data, check_page, sources_of
from repository import ROOT
from toy_analysis import toy_analysis

WRITE = {example.name: example.write for example in (*file_formats.EXAMPLES, *laboratory_formats.EXAMPLES)}
KINDS = ("suite", "distances", "performance", "analysis")
ALL = (*KINDS, "schedule", "recording", "results", "timings", "tuning", "benchmark", "check")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_makes_a_page(kind, tmp_path, no_library):
    check_page(WRITE[kind](tmp_path), charted=kind not in ("suite", "distances"))


@pytest.mark.parametrize("kind", ALL)
def test_what_it_tells_to_type_is_there(kind, tmp_path):
    """Every command in it is one that the command line knows."""
    document = page(sources_of(WRITE[kind](tmp_path)))
    found = re.findall(r"`(blockcache [^`]+)`", markdown(document))
    assert found
    for line in found:
        parse(line.replace(str(tmp_path), "x"), complete=False)


def test_a_suite_is_run_again_as_a_suite(tmp_path):
    assert "blockcache paper suite main tiny" in markdown(page(sources_of(WRITE["suite"](tmp_path))))


def test_figures_for_a_paper_are_written_beside_the_page(tmp_path, blockcache, no_library):
    path = tmp_path / "analysis.safetensors"  # with a heat map, lines and bars
    toy_analysis(without=("similarity", "caching", "homogeneity", "action-costs", "features", "response")).save(path)
    blockcache("report", path, "-o", tmp_path / "out.html", "--figures", tmp_path / "figures")
    drawn = {file.name: file.read_bytes() for file in (tmp_path / "figures").iterdir()}
    names = {chart["name"] for chart in chart_data((tmp_path / "out.html").read_text())["charts"]}
    assert set(drawn) == {f"{name}.{kind}" for name in names for kind in ("svg", "pdf")}
    assert all(data.startswith(b"%PDF") for name, data in drawn.items() if name.endswith("pdf"))
    assert all(b"<svg" in data for name, data in drawn.items() if name.endswith("svg"))


def test_every_claim_stands_on_the_page_with_its_verdict():
    text = markdown(page(Sources(brought=(Source("a", brought(toy_analysis())),))))
    verdicts = {True: "**holds**", False: "**does not hold**", None: "not told"}
    for claim in claims(toy_analysis()):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {claim.claim[:20]}")]
        assert f"| {verdicts[claim.holds]} |" in row


def test_sections_that_were_not_analysed_are_named():
    text = markdown(page(Sources(brought=(Source("a", brought(toy_analysis(without=("weights", "features")))),))))
    assert "Not analysed yet: weights, features." in text
    assert "--only weights --only features" in text
    alone = markdown(page(Sources(brought=(Source("a", brought(toy_analysis(without=("weaker",)))),))))
    assert "`blockcache analyse toy --only weaker --weaker POLICY` does it" in alone


def test_the_page_of_the_shipped_policy_says_what_the_readme_says(blockcache, tmp_path, monkeypatch, no_library):
    monkeypatch.chdir(ROOT)
    said = blockcache("report", "docs/generated/records/frontier-pusht", "pusht", "-o", tmp_path / "out.html")
    assert "6 figures" in said
    read = Reader((tmp_path / "out.html").read_text())
    words = " ".join("".join(read.words).split())
    assert "85x" in words
    assert "-0.003" in words
    assert "95 % interval -0.025 to +0.018, 500 pairs of rollouts" in words
    assert "blockcache export pusht/tuned -o policy.onnx" in words
