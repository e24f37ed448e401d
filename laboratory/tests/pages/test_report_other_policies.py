"""Further tasks on the page of results: an episode counts once, cells are matched by their place, not by their name."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

import blockcache.cli
from blockcache.errors import FileError
from blockcache.measure.statistics import difference_interval
from blockcache.report.document import Document
from blockcache.report.markdown import render
from blockcache_lab.pages.other_policies import load_other_policies, other_policies
from made_suites import lost, make_suite, rows

SEEDS = range(100_000, 100_060)
BAC = "bac:S=10,n=5"


def succeed(results, rule):
    """The same results with success where `rule(method, seed)` says so."""
    changed = [
        replace(record, score=float(rule(record.method, record.seed)), success=bool(rule(record.method, record.seed)))
        for record in results.records
    ]
    return replace(results, records=tuple(changed))


def save(path, rule, weights, task="metaworld-assembly"):
    path.mkdir()
    succeed(make_suite("main", lost, weights=weights * 64, task=task), rule).save(path / "main.json")
    return str(path)


def section(directories):
    """What the page says of them."""
    return render(Document("Results", (other_policies(load_other_policies(directories)),)))


@pytest.fixture
def directories(tmp_path):
    """Two policies of one task. Full always succeeds; BAC fails at every 6th seed with both, at seed 1 with one of them."""
    return [
        save(tmp_path / "one", lambda method, seed: method != BAC or seed % 6 != 0, "a"),
        save(tmp_path / "two", lambda method, seed: method != BAC or (seed % 6 != 0 and seed != SEEDS[1]), "b"),
    ]


def test_an_episode_counts_once_however_many_policies_met_it(directories):
    (task,) = load_other_policies(directories)
    found = task.difference([BAC, BAC], ["full", "full"])
    lost_at = np.array([1.0 if seed % 6 == 0 else 0.5 if seed == SEEDS[1] else 0.0 for seed in SEEDS])
    expected = difference_interval(-lost_at, of_successes=True)
    assert found == expected
    assert found.n == 60


def test_the_table_shows_each_policy_and_what_they_say_together(directories):
    text = section(directories)
    row = next(row for row in rows(text, "BAC S=10 n=5 |"))
    assert row[1] == "120"
    assert row[2] == "0.83, 0.82"
    assert row[3].startswith("-0.175 [")
    assert row[4] == "no"
    rival = next(row for row in rows(text, "DDIM-12 †"))
    assert rival[-2].startswith("-0.175 [")
    assert rival[-1] == "**this**"
    full = next(row for row in rows(text, "full precision |"))
    assert full[2:5] == ["1.00, 1.00", "", ""]
    assert f"`blockcache paper suite main tiny -o {directories[1]} --rollouts 40 --main-rollouts 60`" in text


def test_rivals_of_equal_flops_may_have_different_names(tmp_path, directories):
    path = tmp_path / "three"
    shutil.copytree(directories[0], path)
    text = (path / "main.json").read_text().replace("ddim-12", "ddim-13").replace("a" * 64, "c" * 64)
    (path / "main.json").write_text(text)
    shown = section([*directories, path])
    (row,) = rows(shown, "DDIM-12 / DDIM-13 †")
    assert row[1] == "180"


def test_policies_that_met_other_episodes_are_not_put_together(tmp_path, directories):
    other = tmp_path / "fewer"
    other.mkdir()
    make_suite("main", lost, weights="c" * 64, task="metaworld-assembly", main_rollouts=50).save(other / "main.json")
    with pytest.raises(FileError, match="are not of the same episodes and methods; run one again"):
        load_other_policies([*directories, other])


def test_tasks_stand_apart_and_a_policy_counts_once(tmp_path, directories):
    other = save(tmp_path / "peg", lambda method, seed: True, "a", task="metaworld-peg")
    assert [len(task.policies) for task in load_other_policies([*directories, other])] == [2, 1]
    again = shutil.copytree(directories[0], tmp_path / "again")
    with pytest.raises(FileError, match=r"same policy for task metaworld-assembly; give each once"):
        load_other_policies([*directories, again])


def test_the_command_puts_them_on_the_page(tmp_path, directories, capsys):
    lead = tmp_path / "lead"
    lead.mkdir()
    make_suite("main", lost).save(lead / "main.json")
    blockcache.cli.main(["paper", "results", str(lead), *directories, "-o", str(tmp_path / "docs")])
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "### metaworld-assembly" in text
    assert f"`blockcache paper results {lead} {' '.join(directories)} -o docs/generated`" in text
    assert "pusht with one set of weights, metaworld-assembly with 2" in text
