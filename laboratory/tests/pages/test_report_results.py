"""The page of results: every verdict follows from the records, the printed figures stand beside, no torch is needed."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import blockcache.cli
from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.measure.statistics import Estimate
from blockcache.report.evaluation import evaluation_blocks
from blockcache.report.markdown import render
from blockcache.report.methods import DIFFERENCE, SCORE
from blockcache.results.rollouts import MethodRun, Record, Results
from blockcache.results.stored import Stored, shipped
from blockcache_lab.pages.other_policies import load_other_policies
from blockcache_lab.pages.pictures import plot_tradeoff, points
from blockcache_lab.pages.published import printed_table
from blockcache_lab.pages.results import page as document
from blockcache_lab.pages.suite_parts import REFERENCE, suite_tables
from blockcache_lab.studies.suite_results import Collection, SuiteResults, summarise_suite
from blockcache_lab.studies.suites import FRONTIER, SUITES, TIMINGS, Cell, suite_of
from made_suites import cost, fingerprint, lost, make_suite, rows
from repository import GENERATED, RECORDS, ROOT


def make_timings(path, names):
    seconds = {name: [cost(name) * 1e-3, cost(name) * 1.1e-3, cost(name) * 1.2e-3] for name in names}
    seconds["plain policy"] = [0.5, 0.5, 0.5]
    methods = {name: {"p50": values[1], "seconds": values} for name, values in seconds.items()}
    header = {"format": "blockcache.timings", "version": 1, "made_by": "blockcache", "setting": "seconds per chunk"}
    machine = {"processor": "abacus", "cores": 2, "load_average": [0.25, 1.0, 1.0]}
    path.write_text(json.dumps({**header, "policy": fingerprint(), "machine": machine, "methods": methods}))


def test_the_command_of_a_suite_names_what_was_not_left_at_its_default():
    results = make_suite("main", lost)
    made = SuiteResults(suite_of(results, "main.json"), results)
    usual = "blockcache paper suite main tiny -o there --rollouts 40 --main-rollouts 60"
    assert made.command("there") == usual
    calibration = {**results.setting["calibration"], "generations": 8}
    other = replace(results, setting={**results.setting, "group": 5, "calibration": calibration})
    assert replace(made, results=other).command("there") == f"{usual} --group 5 --generations 8"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("suites")
    every = set()
    for name in SUITES:
        results = make_suite(name, lost)
        results.save(path / f"{name}.json")
        every |= {method.name for method in results.methods}
    make_timings(path / TIMINGS, sorted(every))
    return path


@pytest.fixture
def collection(directory):
    return Collection.load(directory)


def of(directory, **suites):
    """A collection of some suites, each made with its own losses."""
    for name, losses in suites.items():
        make_suite(name, losses).save(directory / f"{name}.json")
    return Collection.load(directory)


def page(*given):
    """The page as it is written."""
    return render(document(*given))


# ---- what the page says


def test_the_figures_are_those_of_the_records(collection):
    text = page(collection, "there")
    main = collection.suites["main"].results
    scores = [np.array([record.score for record in main.of(name).values()]) for name in ("bac:S=10,n=5", "full")]
    row = next(row for row in rows(text, "BAC S=10 n=5 |") if row[1] == "60" and "[" in row[2])
    assert row[2].startswith(f"{scores[0].mean():.3f} [")
    assert row[3].startswith(f"{(scores[0] - scores[1]).mean():+.3f} [")
    assert row[7:9] == ["0.480", "1/8.3"]
    assert "13.2" in row
    assert "blockcache paper suite main tiny -o there --rollouts 40 --main-rollouts 60" in text
    assert "test seeds 100000 to 100059" in text
    assert "on abacus (not a GPU), load 0.2 on 2 cores in the last minute. The plain policy" in text


def test_the_first_episodes_stand_beside_the_others(tmp_path):
    """All methods met the first 40; here BAC is better in them than in the other 60, and the page says so."""
    results = make_suite("main", lost, main_rollouts=100)
    bac = "bac:S=10,n=5"
    kept = [
        replace(record, score=record.score + 0.3) if record.method == bac and record.seed < 100_040 else record
        for record in results.records
    ]
    replace(results, records=tuple(kept)).save(tmp_path / "main.json")
    collection = Collection.load(tmp_path)
    text = page(collection, "there").split("### Are the first episodes like the others?")[1].split("##")[0]
    (row,) = rows(text, "BAC S=10 n=5")
    first, rest = (float(cell.split(" ")[0]) for cell in row[1:])
    assert first == pytest.approx(-lost(bac) + 0.3, abs=2e-3)
    assert rest == pytest.approx(-lost(bac), abs=2e-3)
    assert not rows(text, "BAC S=7")  # it has no others
    full = [record.score for record in results.of("full").values()]
    (row,) = rows(text, "full precision: its score")
    assert [cell.split(" ")[0] for cell in row[1:]] == [f"{np.mean(full[:40]):.3f}", f"{np.mean(full[40:]):.3f}"]
    assert "first episodes" not in page(of(tmp_path, main=lost), "there")  # 40 and 20 more: too few to say


def test_each_method_stands_for_itself_with_its_most_rollouts(collection):
    assert collection.rows["bac:S=10,n=5"].score.n == 60
    assert collection.rows["bac:S=5,n=5"].score.n == 40
    assert collection.compare("bac:S=10,n=5", "uniform:S=12").n == 60
    assert collection.compare("bac:S=10,n=5", "teacache:threshold=0.12").n == 40
    assert collection.compare("bac:S=5,n=5", "uniform:S=12") is None


@pytest.mark.parametrize(
    ("loss", "spread", "section"),
    [
        (0.0, 0.04, "Lossless"),
        (-0.1, 0.04, "Lossless"),
        (0.015, 0.04, "Lossless"),
        (0.025, 0.04, "Worse"),
        (0.2, 0.04, "Worse"),
        (0.0, 0.2, "Not shown either way"),
    ],
)
def test_lossless_is_a_verdict_of_the_data(tmp_path, loss, spread, section):
    make_suite("main", lambda name: loss, spread=spread).save(tmp_path / "main.json")
    text = page(Collection.load(tmp_path), "there")
    (line,) = [line for line in text.splitlines() if line.startswith("- **") and "BAC S=10 n=5 (" in line]
    assert line.startswith(f"- **{section}**")
    row = next(row for row in rows(text, "BAC S=10 n=5 |") if row[4] in ("yes", "no"))
    assert row[4] == ("yes" if section == "Lossless" else "no")
    assert ("yet certainly a little worse" in text) == (loss == 0.015)


@pytest.mark.parametrize(
    ("better", "winner"),
    [(0.1, "**BAC S=10 n=5**"), (-0.1, "**DDIM-12**"), (0.0, "not told apart"), (0.01, "not told apart")],
)
def test_the_winner_follows_from_the_pairs(tmp_path, better, winner):
    text = page(of(tmp_path, main=lambda name: 0.2 + better if name == "ddim-12" else 0.2), "there")
    (row,) = [row for row in rows(text, "BAC S=10 n=5 | DDIM-12") if len(row) == 9]
    assert row[-1] == winner
    wins, loses = (int(better == sign) for sign in (0.1, -0.1))
    assert f"- BAC against DDIM-N: wins {wins}, loses {loses}, not told apart {2 - wins - loses}." in text


def test_every_variant_is_judged_against_the_reference(tmp_path):
    losses = {"mse": 0.0, "l1": 0.1, "wasserstein": 0.2}
    text = page(of(tmp_path, metrics=lambda name: losses.get(name.partition("metric=")[2], 0.1)), "there")
    words = "**better** BAC S=10 n=5 MSE; **worse** BAC S=10 n=5 Wasserstein; **not told apart** BAC S=10 n=5 L1."
    assert f"Against BAC S=10 n=5: {words}" in text


def test_the_cheapest_lossless_method_and_the_frontier_are_named(tmp_path):
    text = page(of(tmp_path, ddim=lambda name: 0.3 if name == "ddim-4" else 0.0), "there")
    assert "The cheapest lossless method is DDIM-40 + BAC S=3 n=3, with 1/20.0 of the FLOPs." in text.replace(
        "1/25.0", "1/20.0"
    )
    (line,) = [line for line in text.splitlines() if "no other method is both cheaper and better than" in line]
    assert "DDIM-4," not in line
    assert not line.endswith("DDIM-4.")


def test_what_is_missing_is_said(directory, tmp_path):
    text = page(of(tmp_path, metrics=lost), "there")
    assert "**Not run yet**, so missing below: main, ablation, n-and-s, ddim." in text
    assert "`blockcache paper timing tiny -o there` measures it" in text
    whole = page(Collection.load(directory), "there")
    assert "Not run yet" not in whole
    assert "on abacus" in whole
    assert "The plain policy in torch takes 500 ms" in whole


def test_a_quick_run_is_no_result(tmp_path):
    make_suite("main", lost, quick=True).save(tmp_path / "main.json")
    collection = Collection.load(tmp_path)
    assert "No figure on this page means anything" in page(collection, "there")
    assert "main tiny -o there --quick" in page(collection, "there")
    with pytest.raises(FileError, match="a quick run is no result to store"):
        summarise_suite(collection, "main")


def test_failed_rollouts_are_counted_and_left_out(tmp_path):
    results = make_suite("metrics", lost)
    first, *others = results.records
    broken = Record(first.method, first.seed, None, None, 3, "RuntimeError: x", None, None)
    Results(**vars(results) | {"records": (broken, *others)}).save(tmp_path / "metrics.json")
    collection = Collection.load(tmp_path)
    assert (collection.full.failed, collection.full.score.n) == (1, 39)
    assert collection.rows["bac:S=10,n=5"].difference.n == 39
    assert rows(page(collection, "there"), "metrics |")[0][3] == "1"


def test_a_method_has_the_same_figures_wherever_it_is_shown(collection):
    item = collection.suites["metrics"]
    results = replace(item.results, setting={**item.results.setting, "open_loop_observations": 32})
    closed, cost, _ = evaluation_blocks(results)
    (section,) = suite_tables(item, ["method", "n", SCORE, DIFFERENCE, "success", "won/lost (p)", "GFLOP", REFERENCE])
    (metrics,) = section.blocks
    names = [column.name for column in metrics.columns]
    assert names[-1] == "difference to BAC S=10 n=5, 95 %"
    by_name = {row[0]: row for row in closed.rows}
    assert [row[:6] for row in metrics.rows] == [
        (method_named(name).label, *by_name[name][1:6]) for name in item.suite.methods
    ]
    assert {row[0]: row[2] for row in cost.rows} == {
        name: f"{cost_of / 1e9:.3f}" for name, cost_of in ((m.name, m.flops) for m in results.methods)
    }


# ---- beside the paper


def test_averages_are_recomputed_from_the_printed_cells():
    table = printed_table("main")["proficient human (PH)"]
    assert table["Full Precision"].average == pytest.approx((4.57 / 6, 4.83 / 6))
    assert table["Uniform(fast)"].average == pytest.approx((4.53 / 6, 4.75 / 6))  # printed: 0.79
    assert printed_table("s_sweep_n3")["mixed tasks"]["BAC (S=5)"].gflops == 1.49
    ddim = printed_table("ddim_k40")["mixed human (MH)"]["BAC (S=3,n=3)"]
    assert (ddim.cells["can"], ddim.gflops) == ((0.54,), None)
    assert ddim.speed == pytest.approx((3.44 + 3.63 + 3.71 + 3.55) / 4)


def test_printed_figures_stand_beside_ours(collection):
    text = page(collection, "there")
    row = rows(text, "BAC(S = 10) |")[0]
    assert row[6:10] == ["0.59 / 0.62", "0.77 / 0.81", "2.66 (1/5.9)", "3.40x"]
    ours = np.mean([record.score for record in collection.suites["main"].results.of("bac:S=10,n=5").values()])
    assert row[10:] == [f"BAC S=10 n=5: {ours:.3f}", "0.48 (1/8.3)", "8.3x"]
    ddim = rows(text, "DDIM (K=40) |")[0]
    assert ddim[-2:] == ["1.60 (1/1.0)", "1.0x"]  # like the printed ones, over DDIM-40
    assert "recomputed from the cells" in text
    assert "This sweep is printed with n = 3; here it has n = 5." in text


# ---- the picture


def test_the_picture_holds_the_methods_at_their_places(collection, tmp_path):
    shown = points(collection)
    kinds = {}
    for point in shown:
        kinds.setdefault(point.method.family, []).append(point.method.facts.setting)
    assert kinds["BAC"] == ["S=3", "S=5", "S=7", "S=10", "S=20"]  # no metrics, no other n
    assert kinds["BAC on DDIM"] == ["S=3", "S=5", "S=10"]
    assert kinds["Uniform"] == ["S=10", "S=12", "S=20", "S=22"]
    assert kinds["DDPM-N"] == ["N=12", "N=22"]
    assert {"DDIM-N", "TeaCache"} < set(kinds)
    (point,) = [point for point in shown if (point.method.family, point.method.facts.setting) == ("BAC", "S=10")]
    assert (point.gflop, point.ms) == (pytest.approx(0.48), pytest.approx(13.2))
    assert point.difference == collection.rows["bac:S=10,n=5"].difference
    plot_tradeoff(collection, tmp_path / "wide.png")
    plot_tradeoff(of(tmp_path, main=lost), tmp_path / "narrow.png")  # without timings, one panel
    sizes = [int.from_bytes((tmp_path / f"{name}.png").read_bytes()[16:20], "big") for name in ("wide", "narrow")]
    assert sizes[0] == 2 * sizes[1] > 1000


# ---- names


@pytest.mark.parametrize(
    ("name", "shown", "kind"),
    [
        ("full", "full precision", "full precision"),
        ("bac:S=10,n=5", "BAC S=10 n=5", "BAC"),
        ("bac:S=10,n=5,metric=l1,objective=consecutive", "BAC S=10 n=5 L1 consecutive", "BAC"),
        ("uniform:S=16", "Uniform S=16", "Uniform"),
        ("blockwise:S=7", "Block-wise ACS S=7", "Block-wise ACS"),
        ("teacache:threshold=0.25", "TeaCache 0.25", "TeaCache"),
        ("ddpm-16", "DDPM-16", "DDPM-N"),
        ("ddim-40+bac:S=5,n=3", "DDIM-40 + BAC S=5 n=3", "BAC on DDIM"),
        ("ddim-40+mine.json", "DDIM-40 + mine.json", "schedule file on DDIM"),
    ],
)
def test_methods_have_names_for_people(name, shown, kind):
    assert (method_named(name).label, method_named(name).family) == (shown, kind)


# ---- refused


def test_suites_that_do_not_belong_together_are_refused(tmp_path):
    def refused(message, **changes):
        make_suite("main", lost).save(tmp_path / "main.json")
        other = make_suite("metrics", lost, weights=changes.pop("weights", "w" * 64))
        Results(**vars(other) | changes).save(tmp_path / "metrics.json")
        with pytest.raises(FileError, match=message):
            Collection.load(tmp_path)

    refused("weights vvvvvvvv instead of wwwwwwww", weights="v" * 64)
    refused("task .*tidy", task={"name": "tidy", "success": "all", "max_steps": 3})
    setting = make_suite("metrics", lost).setting
    refused("another calibration", setting={**setting, "calibration": {"generations": 4}})
    methods = [MethodRun(**vars(method) | {"engine": "loop"}) for method in make_suite("metrics", lost).methods]
    refused("another schedule or engine under the name full than main", methods=tuple(methods))
    with pytest.raises(FileError, match="no suite's results"):
        Collection.load(tmp_path / "nowhere")


def test_timings_of_another_policy_are_refused(tmp_path):
    make_suite("main", lost, weights="v" * 64).save(tmp_path / "main.json")
    make_timings(tmp_path / TIMINGS, ["full"])
    with pytest.raises(FileError, match=r"is of another policy than the suites .weights wwwwwwww instead of vvvvvvvv"):
        Collection.load(tmp_path)


# ---- the stored result


def test_the_stored_result_is_a_small_strict_file(collection, tmp_path):
    stored = summarise_suite(collection, "main")
    stored.save(tmp_path / "stored.json")
    assert Stored.load(tmp_path / "stored.json") == stored
    assert (tmp_path / "stored.json").stat().st_size < 10_000
    bac = stored.of("bac:S=10,n=5")
    assert isinstance(bac.difference, Estimate)
    assert (bac.difference, bac.ms) == (collection.suites["main"].rows["bac:S=10,n=5"].difference, pytest.approx(13.2))
    assert stored.of("full").difference is None
    assert stored.of("bac:S=99,n=5") is None
    value = json.loads((tmp_path / "stored.json").read_text())
    for changes in ({"when": "now"}, {"methods": [3]}, {"methods": [{**value["methods"][0], "score": {"mean": 1}}]}):
        (tmp_path / "bad.json").write_text(json.dumps(value | changes))
        with pytest.raises(FileError, match="garbled"):
            Stored.load(tmp_path / "bad.json")
    with pytest.raises(FileError, match="needs the suite main"):
        summarise_suite(of(tmp_path, metrics=lost), "main")


# ---- the verb


def test_the_verb_renders_whatever_is_there_without_torch(directory, tmp_path):
    (tmp_path / "some").mkdir()
    for name in ("main.json", "ddim.json"):
        (tmp_path / "some" / name).write_bytes((directory / name).read_bytes())
    code = "import sys, blockcache.cli as c; c.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    arguments = ["paper", "results", "some", "-o", "docs", "--stored", "stored.json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "missing suites: ablation, metrics, n-and-s" in done.stdout
    assert "missing timings" in done.stdout
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "results-tradeoff.png" in text
    assert (tmp_path / "docs" / "results-tradeoff.png").exists()
    assert Stored.load(tmp_path / "stored.json").task == "pusht"


def test_the_verb_refuses_an_empty_directory_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        blockcache.cli.main(["paper", "results", str(tmp_path), "-o", str(tmp_path / "docs")])
    assert ended.value.code == 2
    assert "run 'blockcache paper suite main POLICY" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_cells_say_what_they_are_of(collection):
    suite = suite_of(collection.suites["main"].results, "x")
    assert Cell("At the FLOPs of BAC S = 20, n = 5", "ddim-22", "bac:S=20,n=5", None, True) in suite.cells


# ---- the page in the repository


def test_the_published_page_is_what_the_code_makes_of_the_published_records():
    text = (GENERATED / "results.md").read_text()
    (command,) = re.findall(r"`blockcache paper results (.*) -o docs/generated`", text)
    lead, *others = command.split()
    root = ROOT
    further = [
        replace(task, directories=tuple(str(Path(place).relative_to(root)) for place in task.directories))
        for task in load_other_policies([root / other for other in others])
    ]
    assert page(Collection.load(root / lead), lead, further) == text


def test_the_stored_result_is_of_the_published_records():
    assert shipped().of("bac:S=10,n=5").difference.n >= 250
    assert shipped() == summarise_suite(Collection.load(RECORDS / "frontier-pusht", (FRONTIER,)))
