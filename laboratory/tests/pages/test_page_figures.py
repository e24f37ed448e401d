"""Figures in pages that people write: what the records say, between the marks."""

import re
from dataclasses import replace

import pytest

from blockcache.errors import FileError
from blockcache.results.rollouts import SETTLED, Results
from blockcache_lab.pages.figures import count, fill
from blockcache_lab.studies.suite_results import paired
from repository import RECORDS, ROOT

PAGES = (
    "README.md",
    "docs/who-wins-where.md",
    "docs/tune-and-check.md",
    "docs/shipped-policies.md",
)
DIFFERENCE = "-0.003 [-0.025, +0.018]"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_the_figures_of_the_records(page):
    text = (ROOT / page).read_text()
    assert count(text) == len(re.findall("<!-- figures?: ", text)) > 0
    assert fill(text, RECORDS) == text


def test_every_page_with_a_figure_of_the_records_is_compared_with_them():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert {str(page.relative_to(ROOT)) for page in pages if count(page.read_text())} == set(PAGES)


def test_another_number_is_replaced_and_the_rest_stays():
    text = "Tuned: <!-- figure: frontier-pusht tuned difference -->0.5<!-- end -->, and 0.5 stays."
    made = fill(text, RECORDS)
    assert made == f"Tuned: <!-- figure: frontier-pusht tuned difference -->{DIFFERENCE}<!-- end -->, and 0.5 stays."
    assert fill(made, RECORDS) == made


def test_a_table_keeps_its_first_column():
    mark = "<!-- figures: frontier-pusht | plain full tuned | ms flops difference -->\n| a | b | c | d |\n|-|-|-|-|\n"
    made = fill(mark + "| torch | | | |\n| **engine** | 1 | 2 | 3 |\n| ours | | | |\n\n| other | table |\n", RECORDS)
    rows = f"| torch | 222 | 1 | |\n| **engine** | 33.7 | 1 | |\n| ours | 2.6 | 1/25 | {DIFFERENCE} |\n"
    assert made == mark + rows + "\n| other | table |\n"


def test_two_directories_are_two_columns_and_policies_of_one_task_are_taken_together():
    names = "frontier-metaworld-assembly frontier-metaworld-peg-insert-side"
    mark = f"<!-- figures: {names} | bac:S=10,n=5,metric=mse | success -->\n| a | b | c |\n|---|---|---|\n"
    assert fill(mark + "| x | | |\n", RECORDS).endswith("| x | 0.76 | 0.90 |\n")
    one = "<!-- figure: metaworld-assembly-seed* bac:S=7,n=5 difference --><!-- end -->"
    assert "-->-0.647 [" in fill(one, RECORDS)


def shown(asked):
    return fill(f"<!-- figure: {asked} --><!-- end -->", RECORDS).split("-->")[1].removesuffix("<!-- end ")


def test_one_file_of_rollouts_is_compared_within_itself_or_with_another_file():
    tuned, reference = "execution-pusht/fresh-seeds replan=6", "full@frontier-pusht/frontier"
    assert shown(f"{tuned} score").startswith("0.898 [")
    assert shown(f"{tuned} n") == "500"
    own, other = shown(f"{tuned} difference"), shown(f"{tuned} against {reference}")
    assert own == shown(f"{tuned} against full") != other
    assert (own[:6], other[:6]) == (
        "+0.007",
        "+0.004",
    )  # it is pusht/tuned's own file: its full policy takes four steps


def test_a_file_that_ended_when_it_sufficed_has_the_interval_that_allows_for_that(tmp_path):
    results, found = Results.load(RECORDS / "few-metaworld-peg-insert-side/fresh/eval.json"), {}
    for settled in (False, True):
        (tmp_path / str(settled)).mkdir()
        replace(results, setting={**results.setting, SETTLED: settled}).save(tmp_path / str(settled) / "eval.json")
        text = fill(f"<!-- figure: {settled}/eval fitted-5 difference --><!-- end -->", tmp_path)
        found[settled] = text.split("-->", 1)[1].removesuffix("<!-- end -->")
    own, full = ({seed: one.score for seed, one in results.of(name).items()} for name in ("fitted-5", "full"))
    assert found[False] == paired(own, full).text("{:+.3f}")
    assert found[True] == paired(own, full, stopped=True).text("{:+.3f}") != found[False]


def test_a_file_of_halving_has_scores_on_tuning_seeds_besides():
    noise = "execution-pusht/constant-noise noise=1"
    assert shown(f"{noise} tuning-score").startswith("0.892 [")
    assert shown(f"{noise} score").startswith("0.857 [")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            "frontier-pusht ddpm-17 difference",
            "the records frontier-pusht have 0 methods 'ddpm-17', expected one of full",
        ),
        ("frontier-pusht ddpm-16 beauty", "no quantity 'beauty' of frontier-pusht, expected one of ms"),
        ("frontier-pusht plain against full", "no episode that both plain policy and full finished"),
        (
            "pusht/tuned chosen beauty",
            "of a tuning there is 'chosen' with tuning-seeds, fresh-seeds, pairs, minutes, got",
        ),
        ("frontier-nowhere full ms", "no suite's results in"),
        ("few-pusht/nowhere full score", "no results file at"),
        (
            "execution-pusht/fresh-seeds replan=5 score",
            "execution-pusht/fresh-seeds has no scores of 'replan=5', expected",
        ),
        ("execution-pusht/fresh-seeds replan=6 tuning-score", "no scores of 'replan=6', expected one of none"),
        (
            "execution-pusht/fresh-seeds replan=6 beauty",
            "no quantity 'beauty' of execution-pusht/fresh-seeds, expected",
        ),
        ("execution-pusht/fresh-seeds replan=6 against full@few-pusht/three-steps-beside-full", "no episode in common"),
        ("metaworld-nowhere-seed* full difference", "no records at"),
        (
            "metaworld-assembly-seed* full ms",
            "of several policies there is 'difference' and 'against METHOD', got 'ms'",
        ),
    ],
)
def test_what_the_records_do_not_hold_is_refused(asked, sentence):
    with pytest.raises(FileError, match=re.escape(sentence)):
        fill(f"<!-- figure: {asked} --><!-- end -->", RECORDS)


def test_a_table_with_too_few_rows_is_refused():
    mark = "<!-- figures: frontier-pusht | full tuned | ms -->\n| a | b |\n|---|---|\n| x | |\n"
    with pytest.raises(FileError, match="has 1 rows, expected 2"):
        fill(mark, RECORDS)


def test_the_command_writes_the_page_and_says_what_it_did(tmp_path, blockcache):
    page = tmp_path / "page.md"
    page.write_text("<!-- figure: frontier-pusht tuned n -->0<!-- end -->\n")
    words = ("paper", "figures", page, "--records", RECORDS)
    assert blockcache(*words).strip() == f"{page}: 1 figures and tables, now as the records have them"
    assert page.read_text() == "<!-- figure: frontier-pusht tuned n -->500<!-- end -->\n"
    assert blockcache(*words).strip() == f"{page}: 1 figures and tables"
