"""`blockcache report`: every kind of file makes a page, what does not belong together is refused, and names do no harm."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from blockcache.errors import FileError
from blockcache.measure.action_error import ActionError
from blockcache.measure.distance import Distances
from blockcache.measure.statistics import Estimate
from blockcache.report import html
from blockcache.report.chart import Axis, Bars, HeatMap, Marks, Panel, Series
from blockcache.report.document import Chart, Document, Fact, Facts, Folded, Paragraph, Section, charts, table
from blockcache.report.drawing import save_charts
from blockcache.report.markdown import render as markdown
from blockcache.report.overview.answer import find_answer
from blockcache.report.overview.page import page
from blockcache.report.overview.schedules import Shown, added_by_union, schedules_section
from blockcache.report.overview.sources import Source, Sources
from blockcache.report.terminal import display
from blockcache.report.tuning import tuning_blocks
from blockcache.results.check import Check
from blockcache.results.rollouts import MethodRun, Record, Results
from blockcache.results.tuning import Goal, Tuning
from blockcache.schedule import Schedule
from blockcache.solvers import solve
from disk import full_disk
from file_formats import EXAMPLES
from made_up_policy import NASTY, blocks, fingerprint, named_schedule, recording, schedule
from read_pages import Reader, chart_data, check_page, sources_of

KINDS = ("schedule", "recording", "results", "timings", "tuning", "benchmark", "check")
WRITE = {example.name: example.write for example in EXAMPLES}
DOT = HeatMap(np.eye(2), "size", 0, 1)
PANEL = Panel(Axis("x"), Axis("y"), (DOT,))
CHART = Chart("dots", "Some dots", "Two dots.", (PANEL,), table(["a"], [["1"]]), "They are dots.")


# ---- values


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeatMap(np.zeros(3), "size", 0, 1), "rows and columns"),
        (lambda: HeatMap(np.zeros((600, 600)), "size", 0, 1), "250,000 cells at most"),
        (lambda: HeatMap(np.eye(2), "size", 0, np.inf), "are finite"),
        (lambda: HeatMap(np.eye(2), "size", 0, 1, (Marks("update", ((0, 2),)),)), "lies outside of the 2 x 2"),
        (lambda: Series("a", (1.0,), ()), "0 y for 1 points"),
        (lambda: Series("a", (1.0,), (2.0,), notes=("x", "y")), "2 notes for 1 points"),
        (lambda: Series("a", (1.0,), (np.nan,)), "finite numbers"),
        (lambda: Bars("a", (1.0,), (), ()), "equally many"),
        (lambda: Panel(Axis("x"), Axis("y"), ()), "got no layer"),
        (lambda: replace(CHART, name="Two Words"), "small letters, digits and hyphens"),
        (lambda: replace(CHART, panels=()), "at least one panel"),
        (lambda: Fact("", "speed"), "a fact is one line"),
    ],
)
def test_what_could_not_be_drawn_is_refused_when_it_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_charts_and_facts_are_shown_without_a_browser_too(capsys):
    document = Document("D", (Facts((Fact("3x", "faster", "really"),)), Section("S", (Folded("F", (CHART,)),))))
    assert charts(document.blocks) == (CHART,)
    text = markdown(document)
    assert "- **3x** faster: really" in text
    assert "**Some dots.** They are dots.\n\n| a |" in text
    display(document)
    shown = capsys.readouterr().out
    assert "- 3x faster: really" in shown
    assert "Some dots. They are dots." in shown


# ---- the renderer


def test_names_do_no_harm(no_library):
    nasty = replace(CHART, alt=NASTY, panels=(replace(PANEL, title=NASTY, x=Axis(NASTY)),))
    document = page(Sources(schedules=(Source(NASTY, named_schedule(NASTY)),), command=NASTY))
    for text in (html.render(document), html.render(Document("D", (nasty,)))):
        read = Reader(text)
        assert [tag for tag, _ in read.elements].count("script") == 3  # ours, and none of a name's
        assert "alert(1)" not in "".join(re.findall(r"<script>(.*?)</script>", text, re.DOTALL))
        assert NASTY in json.dumps(chart_data(text), ensure_ascii=False).replace('\\"', '"')
    read = Reader(html.render(document))
    assert NASTY in " ".join("".join(read.words).split())
    assert not any(name.startswith("on") for _, attributes in read.elements for name in attributes)


def test_links_lead_only_where_it_is_safe(no_library):
    text = html.render(
        Document("D", (Paragraph("[a](javascript:x) [b](https://b.example) [c](#here) [d](docs/d.md)"),))
    )
    found = [attributes["href"] for tag, attributes in Reader(text).elements if tag == "a"]
    assert found == ["#content", "https://b.example", "#here"]


def test_a_page_says_that_nothing_may_be_loaded_and_loads_nothing(no_library):
    read = Reader(html.render(Document("D", (CHART,))))
    (policy,) = [item["content"] for tag, item in read.elements if item.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert not [item for tag, item in read.elements if "src" in item or (tag == "link")]
    assert ("html", {"lang": "en"}) in read.elements
    (plot,) = [item for _, item in read.elements if item.get("data-chart") == "dots"]
    assert plot["tabindex"] == "0"
    assert plot["aria-label"].startswith("Two dots.")
    assert "The figures as a table" in read.words


def test_a_page_that_grew_too_large_is_refused(no_library, monkeypatch):
    monkeypatch.setattr(html, "MOST_BYTES", 1000)
    with pytest.raises(FileError, match="expected 1,000 at most; give it fewer files"):
        html.render(Document("D", (CHART,)))
    with pytest.raises(ValueError, match="two charts are called dots"):
        html.render(Document("D", (CHART, CHART)))


# ---- files


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_makes_a_page(kind, tmp_path, no_library):
    check_page(WRITE[kind](tmp_path), charted=kind not in ("results", "check"))


def test_sections_without_their_file_say_which_command_fills_them():
    text = markdown(page(Sources(schedules=(Source("s.json", schedule(2, 10)),))))
    for command in (
        "tune POLICY",
        "eval POLICY",
        "bench POLICY --json",
        "analyse POLICY -o",
        "tune POLICY --loss 0.03 -o",
    ):
        assert f"`blockcache {command}" in text
    nothing = markdown(page(Sources(recordings=(Source("r", recording(2, 10)),))))
    assert "`blockcache solve recording.safetensors" in nothing


def test_a_directory_stands_for_its_files(tmp_path):
    for kind in ("schedule", "recording", "results", "sampler"):
        WRITE[kind](tmp_path)
    (tmp_path / "notes.txt").write_text("not a file of ours")
    (tmp_path / "tuned").mkdir()
    WRITE["tuning"](tmp_path / "tuned")
    found = sources_of(tmp_path)
    assert [len(getattr(found, kind)) for kind in ("schedules", "recordings", "results", "tunings")] == [1, 1, 1, 1]
    assert found.schedules[0].path == str(tmp_path / "schedule.json")
    assert found.tunings[0].path == str(tmp_path / "tuned" / "tuning.json")


def test_what_cannot_be_reported_on_is_refused(tmp_path, refused):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out.html"
    assert "nothing in the directory" in refused("report", tmp_path / "empty", "-o", out)
    sampler = WRITE["sampler"](tmp_path)
    assert f"{sampler} cannot be reported on: its format is 'blockcache.sampler', expected a policy's" in refused(
        "report", sampler, "-o", out
    )
    assert "does not exist" in refused("report", tmp_path / "none.json", "-o", out)
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    assert "no safetensors header" in refused("report", tmp_path / "cut.safetensors", "-o", out)
    assert "Missing argument" in refused("report", "-o", out)
    assert not out.exists()


def test_files_of_different_policies_are_refused_and_named(tmp_path, refused):
    results = WRITE["results"](tmp_path)
    other = tmp_path / "other.safetensors"
    recording(weights="cd" * 32).save(other)
    said = refused("report", results, other, "-o", tmp_path / "out.html")
    assert said.startswith(f"{other} is of another policy than {results} (")
    assert "weights cdcdcdcd instead of abababab" in said
    assert "leave out one of them" in said


def test_a_file_that_leaves_the_policy_open_hides_no_difference(tmp_path):
    printed = replace(schedule(), fingerprint=fingerprint(weights=None))
    one, other = recording(weights="ab" * 32), recording(weights="cd" * 32)
    Sources(schedules=(Source("s", printed),), recordings=(Source("one", one),))
    with pytest.raises(FileError, match="other is of another policy than one"):
        Sources(schedules=(Source("s", printed),), recordings=(Source("one", one), Source("other", other)))


def test_a_policy_with_another_sampler_is_the_same_policy():
    few = recording(2, 10)
    many = schedule(2, 20)
    found = Sources(recordings=(Source("r", few),), schedules=(Source("s", many),))
    (chart,) = charts((schedules_section(found),))
    assert np.isnan(chart.panels[0].layers[0].values).all()  # its errors are those of another sampler


def test_a_results_file_of_a_newer_version_is_refused(tmp_path, refused):
    path = WRITE["results"](tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    said = refused("report", path, "-o", tmp_path / "out.html")
    assert "has format version 99, this blockcache reads version 1" in said
    assert not (tmp_path / "out.html").exists()


def test_an_old_page_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch, blockcache, refused, no_library):
    path, out = WRITE["schedule"](tmp_path), tmp_path / "out.html"
    out.write_text("the old page")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full_disk)
        assert "No space left on device; nothing was changed" in refused("report", path, "-o", out)
    assert out.read_text() == "the old page"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["out.html", "schedule.json"]
    assert "1 figures" in blockcache("report", path, "-o", out)
    assert out.read_text().startswith("<!DOCTYPE html>")


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, refused):
    path = WRITE["schedule"](tmp_path)
    monkeypatch.setattr("blockcache.extras.installed_version", lambda module: None)
    said = refused("report", path, "-o", tmp_path / "out.html")
    assert said.startswith("a page with figures needs plotly, which is not installed")
    assert '"blockcache[report]"' in said
    monkeypatch.undo()
    monkeypatch.setattr("blockcache.extras.installed", lambda module: False)
    said = refused("report", path, "-o", tmp_path / "out.html", "--figures", tmp_path / "figures")
    assert "a picture needs matplotlib" in said
    assert '"blockcache[plots]"' in said
    assert not (tmp_path / "out.html").exists()


def test_a_figure_is_the_same_file_whenever_it_is_drawn(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_charts([CHART], tmp_path / name)
    for file in ("dots.svg", "dots.pdf"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


# ---- what it says


def test_the_union_is_told_apart_by_the_recording():
    seen = recording(3, 30)
    made = solve(seen, updates=4, union=3)
    own = solve(seen, updates=4, method="blockwise")
    found = Sources(recordings=(Source("r", seen),), schedules=(Source("s", made),))
    (chart,) = charts((schedules_section(found),))
    heat = chart.panels[0].layers[0]
    plain, union = heat.marks
    rows = {name: row for row, name in enumerate(made.blocks)}
    added = {(rows[name], step) for name in made.blocks for step in set(made.updates[name]) - set(own.updates[name])}
    assert set(union.cells) == added
    assert added
    assert union.name == "update, added by the union"
    assert set(plain.cells) == {(rows[name], step) for name, steps in made.updates.items() for step in steps} - added
    # what a reused cell is charged: how unlike its own feature the last computed one is
    name, step = next((n, s) for n in made.blocks for s in range(30) if s not in made.updates[n])
    last = max(s for s in made.updates[name] if s < step)
    assert heat.values[rows[name], step] == pytest.approx(1 - seen.matrix("cosine", name)[last, step])


def test_without_a_recording_the_page_does_not_say_more_than_it_knows():
    made = schedule(3, 30)
    added, certain = added_by_union(Shown("t", "s", made))
    assert not certain
    upstream = made.origin["union_blocks"]
    assert set(added) == set(upstream)
    own = solve(recording(3, 30), updates=3, method="blockwise")
    for name in upstream:
        assert set(made.updates[name]) - set(own.updates[name]) <= added[name] | {0}
    (chart,) = charts((schedules_section(Sources(schedules=(Source("s", made),))),))
    assert [mark.name for mark in chart.panels[0].layers[0].marks] == [
        "update",
        "update, its own or added by the union",
    ]


def test_large_families_fit(no_library):
    """84 blocks and 20 steps; all blocks are in the picture and in its table."""
    seen = recording(28, 20)
    found = Sources(recordings=(Source("r", seen),), schedules=(Source("s", solve(seen, updates=4, union=5)),))
    document = page(found)
    first, matrices, *_ = charts(document.blocks)
    assert first.panels[0].layers[0].values.shape == (84, 20)
    assert first.panels[0].y.names == tuple(block.name for block in blocks(28))
    assert len(first.table.rows) == 84
    assert len(matrices.panels) == 24
    assert len(matrices.table.rows) == 84
    assert len(html.render(document)) < 1_000_000


def results_of(losses, n=60):
    """Scores of a full policy and of methods that lose so much, hardly scattered."""
    rng = np.random.default_rng(0)
    base = rng.uniform(0.8, 0.9, n)
    methods = {"full": (0.0, 100), **losses}
    runs = [
        MethodRun(
            name, "onnx", {"type": "ddpm", "num_inference_steps": 100}, None, True, cost, 0.0, ActionError(0.1, 0.2)
        )
        for name, (_, cost) in methods.items()
    ]
    records = [
        Record(name, seed, float(base[seed] - loss + rng.normal(0, 0.001)), True, 9, None, None, None)
        for name, (loss, _) in methods.items()
        for seed in range(n)
    ]
    setting = {
        "first_seed": 0,
        "rollouts": n,
        "group": 5,
        "open_loop_observations": 4,
        "calibration": {"generations": 4},
    }
    task = {"name": "toy", "success": "near", "max_steps": 9}
    policy = {"source": "tiny", "fingerprint": fingerprint().to_dict()}
    return Results(task, policy, setting, ActionError(0.1, 0.2), tuple(runs), tuple(records))


def test_the_answer_is_the_cheapest_without_a_loss():
    found = Sources(
        results=(Source("r", results_of({"ddim-10": (0.01, 10), "ddim-5": (0.2, 5), "ddpm-16": (0.0, 16)})),)
    )
    answer = find_answer(found)
    assert answer.name == "ddim-10"
    assert answer.share == 0.1
    assert answer.difference.mean == pytest.approx(-0.01, abs=0.001)
    text = markdown(page(found))
    assert (
        "**DDIM-10.** The cheapest of 2 lossless ones among 3 methods. A loss of 0.03 of the score is ruled out" in text
    )
    assert "- **1/10** of the full policy's FLOPs" in text


def test_methods_whose_flops_are_not_known_make_a_page(no_library):
    known = results_of({"ddim-10": (0.0, 10)})
    unknown = replace(known, methods=tuple(replace(item, flops=0) for item in known.methods))
    found = Sources(results=(Source("r", unknown),))
    assert find_answer(found).share is None
    assert "of the full policy's FLOPs" not in html.render(page(found))


def test_where_everything_loses_the_answer_says_so():
    found = Sources(results=(Source("r", results_of({"ddim-5": (0.2, 5), "ddim-10": (0.1, 10)})),))
    text = markdown(page(found))
    assert "None of 2 methods is shown to be lossless; this one comes nearest." in text
    assert "A loss of 0.03 of the score is **not** ruled out." in text
    assert find_answer(found).name == "ddim-10"


def test_a_single_rollout_makes_a_page_without_intervals(no_library):
    found = Sources(results=(Source("r", results_of({"ddim-5": (0.2, 5)}, n=1)),))
    text = html.render(page(found))
    assert "95 % interval" not in text.split("<h2")[0]
    assert "1 pair of rollouts" in text


def test_a_single_step_makes_a_page(no_library):
    one = recording(2, 1)
    made = Sources(
        recordings=(Source("r", one),), schedules=(Source("s", Schedule.every_step(1, one.fingerprint.blocks)),)
    )
    assert [chart["name"] for chart in chart_data(html.render(page(made)))["charts"]] == ["schedule-1", "similarity"]


def test_a_tuning_is_the_answer_with_the_figure_of_most_rollouts(tmp_path):
    path = WRITE["tuning"](tmp_path)
    tuning = Tuning.load(path)
    answer = find_answer(sources_of(path))
    assert answer.ms == tuning.chosen.p50_ms
    assert answer.plain == tuning.plain_ms
    assert answer.speed == tuning.plain_ms / tuning.chosen.p50_ms
    known = [found for found in (tuning.fresh, tuning.chosen.rollouts) if found is not None]
    assert answer.difference == max(known, key=lambda found: found.n)
    assert answer.next[0] == f"blockcache export {tmp_path} -o policy.onnx"
    command = "blockcache tune my_module:make --loss 0.03 --observations obs.npz"
    for source, setting, typed in (
        ("my_module:make", {"command": command}, "my_module:make"),
        ("lerobot/", {"command": command, "holds_policy": False}, "lerobot/"),
        ("", {"command": command}, "POLICY"),
    ):
        other = replace(tuning, policy={**tuning.policy, "source": source}, setting={**tuning.setting, **setting})
        made = Sources(tunings=(Source("out/tuning.json", other),))
        expected = [
            f"blockcache {verb}"
            for verb in (f"export {typed} --tuned out -o policy.onnx", f"bench {typed} --tuned out")
        ]
        assert list(find_answer(made).next) == expected  # which the directory itself would not do: no policy is in it
        assert f"`{command}`" in markdown(page(made))


def without_rollouts(tuning, **changes):
    """A tuning where there is no simulator."""
    point = replace(tuning.chosen, rollouts=None)
    return replace(tuning, points=(point,), chosen=point, fresh=None, **changes)


def test_predicted_loss_spread_and_what_was_not_tried_stand_at_the_top(tmp_path):
    late = "not tried, as the time was up: fitted-3, placed-8"
    tuning = without_rollouts(Tuning.load(WRITE["tuning"](tmp_path)), notes=(late,))
    top = markdown(page(Sources(tunings=(Source("tuning.json", tuning),)))).split("\n## ")[0]
    assert f"- **{tuning.chosen.loss:.3f}** predicted loss of the score: from how far the actions" in top
    assert "not rolled out" in top
    assert "- **50%** of the spread of the policy's actions is kept: 95 % interval 0.40 to 0.60" in top
    assert "- Not tried, as the time was up: fitted-3, placed-8." in top
    assert "What it costs in the task was not measured: the loss is a prediction." in top


def test_the_page_of_a_tuning_has_its_bound_and_where_the_policy_lies(tmp_path):
    """With rollouts too; and of one whose bound was not kept it says so."""
    where = "the policy beside those that losses were learnt on: family dp-t, its actions' spread 0.1"
    tuning = Tuning.load(WRITE["tuning"](tmp_path))
    for bound, promise in (
        (0.123, "with 90 % certainty it loses at most 0.123"),
        (1.0, "nothing is promised"),
        (None, "its bound was not kept"),
    ):
        point = replace(tuning.chosen, bound=bound)
        rolled = replace(tuning, points=(point,), chosen=point, notes=(where,))
        for found in (rolled, without_rollouts(rolled)):
            text = markdown(page(Sources(tunings=(Source("tuning.json", found),))))
            top = text.split("\n## ")[0]
            assert f"- The policy beside {where.removeprefix('the policy beside ')}." in top
            assert promise in top
            assert f"a loss of {point.loss:.3f} is predicted, {promise}" in tuning_blocks(found)[0].text
            assert ("| 0.123 |" in text) is (bound == 0.123)
    assert "a loss of 0.100 was predicted, its bound was not kept" in markdown(
        page(Sources(tunings=(Source("tuning.json", rolled),)))
    )


def test_a_check_makes_a_page_of_its_own(tmp_path, no_library, blockcache):
    path, out = WRITE["check"](tmp_path), tmp_path / "out.html"
    blockcache("report", path, "-o", out)
    words = " ".join(" ".join(Reader(out.read_text()).words).split())
    found = Check.load(path)
    assert f"uniform:S=3: {found.verdict}" in words
    assert "speed not timed blockcache bench times engines" in words
    assert f"predicted loss of the score {found.loss:.3f} from how far" in words
    assert f"not rolled out; {found.prediction.words}" in words  # the bound beside the prediction
    assert f"The policy beside those that losses were learnt on: {found.prediction.where}" in words
    assert "of the full policy's FLOPs 1/4" in words
    assert "energy beyond spread" in words  # the table that `check` prints
    assert "blockcache check tiny uniform:S=3 --count 9 --samples 4" in words
    assert "blockcache eval tiny -m uniform:S=3" in words


def test_of_several_checks_the_one_that_is_predicted_to_lose_least_is_the_answer(tmp_path):
    found = Check.load(WRITE["check"](tmp_path))
    still = Distances(*(Estimate(value, value, value, 9) for value in (0.0, 0.0, 1.0, 0.0)))
    fine = replace(found.features, shift=0.0, beyond_spread=0.0, wider=0.0, rougher=0.0)
    enough = {**found.setting, "observations": 48, "samples": 16}
    better = replace(found, method={**found.method, "name": "ddpm-10"}, distances=still, features=fine, setting=enough)
    both = Sources(checks=(Source("one.json", found), Source("two.json", better)))
    assert find_answer(both).what == "ddpm-10: looks lossless"
    text = markdown(page(both))
    assert "which is the least of 2 that were checked" in text
    assert text.index("### uniform:S=3") < text.index("### ddpm-10")


def test_a_check_of_another_policy_is_refused(tmp_path):
    found = Check.load(WRITE["check"](tmp_path))
    with pytest.raises(FileError, match="other is of another policy than check"):
        Sources(
            checks=(Source("check", found),),
            recordings=(Source("other", recording(weights="cd" * 32)),),
        )


def drawn_goal(tuning):
    """Of the tuning's picture: milliseconds of its chosen point, the axis' title, and the rules."""
    (chart,) = [one for one in charts(page(Sources(tunings=(Source("t", tuning),))).blocks) if one.name == "tuning-1"]
    (panel,) = chart.panels
    (star,) = [layer for layer in panel.layers if layer.name == "chosen"]
    return star.x, panel.x.title, [(rule.axis, rule.at) for rule in panel.rules]


def test_the_deadline_is_drawn_against_what_is_judged_and_no_goal_that_was_not_given(tmp_path):
    tuning = Tuning.load(WRITE["tuning"](tmp_path))
    assert tuning.goal == Goal(deadline_ms=3.0)
    assert drawn_goal(tuning) == ((tuning.chosen.p95_ms,), "ms per chunk (p95)", [("x", 3.0)])
    steady = replace(tuning.chosen, method="ddpm-5", p50_ms=1.1, p95_ms=1.15, rollouts=None, loss=0.05)
    with_steady = replace(tuning, points=(tuning.chosen, steady))
    assert [point.method for point in with_steady.front] == ["ddpm-5", tuning.chosen.method]  # by p95, as it is judged
    allowed = replace(tuning, goal=Goal(loss=0.02))
    assert drawn_goal(allowed) == ((tuning.chosen.p50_ms,), "ms per chunk (p50)", [("y", 0.02)])


def test_no_torch_is_needed(tmp_path):
    """So that a page is there in a moment, and where torch is not."""
    for kind in ("schedule", "recording", "results", "timings", "tuning"):
        WRITE[kind](tmp_path)
    code = "import sys, blockcache.cli as c; c.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    arguments = ["report", ".", "-o", "out.html"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.html").stat().st_size < 8_000_000


def test_a_schedule_of_a_foreign_family_has_blocks_of_any_name():
    made = Schedule(4, {"encoder/attn": [0, 2], "mix": [0]}, origin={"method": "own"})
    (chart,) = charts((schedules_section(Sources(schedules=(Source("s", made),))),))
    assert chart.panels[0].y.names == ("encoder/attn", "mix")
    assert chart.alt.startswith("2 blocks by 4 steps: 3 updates")
