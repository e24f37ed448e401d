"""The page of the paper's tables: its cells and sentences follow from records that are made by hand."""

from dataclasses import asdict

import pytest

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.measure.action_error import ActionError
from blockcache.measure.features import ActionFeatures
from blockcache.models.registry import port_of
from blockcache.report.markdown import render
from blockcache.results.rollouts import MethodRun, Record, Results
from blockcache.samplers import DDPM
from blockcache_lab.pages.policy_table import PolicyTable, difference_at
from blockcache_lab.pages.protocol import TrainingRuns
from blockcache_lab.pages.published import PLACES, printed_cell
from blockcache_lab.pages.tables import findings, page
from blockcache_lab.studies.open_loop import open_loop_of
from blockcache_lab.studies.suite_runs import RolloutCounts, SuiteRun, SuiteSetting
from blockcache_lab.studies.suites import ALONE, BASE, KINDS, SUITES, TABLES, Cell, Suite, suite_by_name, with_tuned
from toy_task import Toy, observations

OWN = {"type": "ddpm", "num_inference_steps": 100, "num_train_timesteps": 100}
EPISODES = 100


def make(directory, task, scores, dropout=0.0, jerks=(0.1, 0.1), shift=0.07, name=TABLES, tuned=None, **more):
    """`scores` gives a method's score of an episode by its place; `jerks` are of full precision and of all else. `name` is
    the suite's, or of any other file; `more` is of the setting."""
    suite = suite_by_name(name if name in KINDS else TABLES, lambda kind, method: method_named(f"{kind}-16"))
    suite = suite if tuned is None else with_tuned(suite, tuned)
    names = list(dict.fromkeys(("full", *suite.methods)))
    records = [
        Record(name, 150_000 + place, score, score == 1, 50, None, jerks[name != "full"], 0.1)
        for name in names
        for place in range(EPISODES)
        for score in [scores(name, place)]
    ]
    features = ActionFeatures(shift, 0.1, 0.0, 0.02, 0.3, 0.05)
    setting = {
        "first_seed": 150_000,
        "rollouts": EPISODES,
        "group": 10,
        "open_loop_observations": 32,
        "calibration": {"generations": 16, "seed": 0, "observations": "x"},
        "suite": suite.describe(),
        "open_loop": {"dropout": dropout, "features": {BASE: asdict(features)}},
        **more,
    }
    fingerprint = {"family": "dp-t", "blocks": ["layers.0.SA"], "widths": {"width": 64}, "steps": 100, "sampler": OWN}
    directory.mkdir(parents=True, exist_ok=True)
    Results(
        task={"name": task, "success": "the simulator's flag", "max_steps": 200},
        policy={"source": "somewhere", "fingerprint": {**fingerprint, "weights": "a" * 64}},
        setting=setting,
        noise_floor=ActionError(0.09, 0.2),
        methods=tuple(
            MethodRun(name, "onnx", OWN, None, True, 600 if name == "full" else 100, 0.5, ActionError(0.1, 0.2))
            for name in names
        ),
        records=tuple(records),
    ).save(directory / f"{name}.json")
    return PolicyTable.load(str(directory)) if name in KINDS else None


def lossy(lost):
    """Full precision always succeeds, and so do few steps; whatever reuses fails in the first `lost` episodes."""
    return lambda name, place: float(name == "full" or name.startswith(("ddpm", "fitted")) or place >= lost)


@pytest.fixture
def three(tmp_path):
    return [
        make(tmp_path / "lift", "robosuite-lift-ph", lossy(20), jerks=(0.1, 0.3)),
        make(tmp_path / "lift-dropout", "robosuite-lift-ph", lossy(5), dropout=0.3, jerks=(0.1, 0.2)),
        make(tmp_path / "blocks", "block-pushing", lambda name, place: (1.0, 0.49, 0.49, 0.0)[place % 4]),
    ]


def test_sentences_follow_from_the_records(three):
    where, dropout, goes_with = findings(three)
    assert "is lossless on 1 of 3 policies (blocks), loses on 1 (lift (-0.200)), and on 1 neither" in where
    assert "neither is shown (lift-dropout (dropout 0.3))" in where  # 5 of 100 may be chance
    assert "robosuite-lift-ph +0.150 [" in dropout  # 5 lost instead of 20, of 100
    assert "how much rougher its actions are +1.00" in goes_with  # 3, 2 and 1 times, as the losses are ordered
    assert "all episodes together" not in dropout  # of one task
    assert "were looked at" not in goes_with  # all three look alike
    assert "BAC's centre shift is smaller on 0 of 1 tasks, what it adds to the roughness on 0" in dropout
    assert findings(three[:1])[1] == "**Dropout**: no task has policies with it and without."


def test_what_the_actions_look_like_is_ordered_with_the_losses(tmp_path):
    """Losses of 0.3, 0.2 and 0 beside shifts of 0.09, 0.05 and 0.07: two of three pairs stand in order."""
    made = zip(("a", "b", "c"), (30, 20, 0), (0.09, 0.05, 0.07), strict=True)
    policies = [
        make(tmp_path / name, f"metaworld-{name}", lossy(lost), jerks=(0.1, 0.2 + lost), shift=shift)
        for name, lost, shift in made
    ]
    goes_with = findings(policies)[2]
    assert "; over the 3 whose actions were looked at, with its centre shift +0.50." in goes_with


def test_what_was_tuned_stands_among_the_rivals(tmp_path):
    made = make(tmp_path / "lift", "robosuite-lift-ph", lossy(20), tuned="out/tuned")
    rivals = render(page([made])).split("## Rivals")[1].split("## Trained")[0]
    assert "| lift | tuned |" in rivals
    assert "| lift | tuned |" not in render(page([made])).split("## Rivals")[0]


def test_episodes_that_ended_when_they_sufficed_have_intervals_that_allow_for_that(tmp_path):

    def scores(name, place):
        return float(name != BASE or place % 5 > 0)

    fixed = make(tmp_path / "fixed", "robosuite-lift-ph", scores)
    stopped = make(tmp_path / "stopped", "robosuite-lift-ph", scores, dropout=0.3, until_settled=True)
    place = PLACES["robosuite-lift-ph"][0]
    for narrow, wide in (
        (fixed.loss, stopped.loss),
        (fixed.first.compare(BASE, "fitted-5"), stopped.first.compare(BASE, "fitted-5")),
        (difference_at(fixed.first, BASE, place), difference_at(stopped.first, BASE, place)),
    ):
        assert narrow.mean == wide.mean == -0.2
        assert wide.low < narrow.low
        assert narrow.high < wide.high
    assert stopped.loss == stopped.first.rows[BASE].difference  # as everywhere else
    assert stopped.first.command("out").endswith("--rollouts 100 --main-rollouts 100 --until-settled")
    assert "until-settled" not in fixed.first.command("out")
    assert findings([fixed, stopped])[1] == "**Dropout**: no task has policies with it and without."


def test_a_policy_that_two_suites_know_counts_once(three, tmp_path):
    again = make(tmp_path / "lift-again", "robosuite-lift-ph", lossy(20), jerks=(0.1, 0.3))
    assert findings([*three, again]) == findings(three)


@pytest.mark.parametrize(
    ("without", "said"),
    [(10, "less is lost with it"), (0, "no difference is shown")],
)
def test_what_dropout_changes_is_said_of_all_tasks_together(three, tmp_path, without, said):
    """On one task it saves 15 of 100 episodes; on the other as many as are lost without it."""
    more = [
        make(tmp_path / "can", "robosuite-can-ph", lossy(without)),
        make(tmp_path / "can-dropout", "robosuite-can-ph", lossy(15 if not without else 0), dropout=0.3, shift=0.01),
    ]
    dropout = findings([*three, *more])[1]
    together = {10: "+0.125 [", 0: "+0.000 ["}[without]
    assert f"; all episodes together {together}" in dropout
    assert f": {said}, of one training seed each. With it BAC's centre shift is smaller on 1 of 2 tasks" in dropout


def test_cells_stand_beside_the_printed_ones(three):
    text = render(page(three))
    lift = [line for line in text.splitlines() if line.startswith("| lift | lift |")]
    assert any(
        "BAC(S = 10)" in line and "1.00 / 1.00" in line and "0.80 [" in line and "-0.200 [" in line for line in lift
    )
    blocks = [line for line in text.splitlines() if line.startswith("| blocks | block pushing p")]
    reached = {
        line.split("|")[2].strip(): line.split("|")[7].split("[")[0].strip() for line in blocks if "Full" in line
    }
    assert reached == {"block pushing p1": "0.75", "block pushing p2": "0.25"}
    assert "| lift | DDPM-16 | 1/6.0 | 1.000 [" in text
    assert "| -0.200 [" in text.split("## Rivals")[1].split("DDPM-16 placed")[0]  # BAC less DDPM-16
    assert "**this**" in text
    assert "0.100 to 0.300 | 0.050 | +0.020 | 0.070 |" in text


def test_every_place_is_printed():
    for places in PLACES.values():
        for place in places:
            for row in ("Full Precision", "Uniform(fast)", "BAC(S = 10)"):
                assert all(0 <= value <= 1 for value in printed_cell(f"main/{row}", place))


def test_every_row_that_a_suite_names_is_printed_for_some_task():
    """S was varied on few tasks, which have other names there."""
    suites = [suite_by_name(name, lambda kind, method: method_named(f"{kind}-16")) for name in (*SUITES, TABLES)]
    rows = {cell.printed for suite in suites for cell in suite.cells if cell.printed}
    places = [place for found in PLACES.values() for place in found]
    assert all(any(printed_cell(row, place) for place in places) for row in rows)
    sweep = [place.cell for place in places if printed_cell("s_sweep_n3/BAC (S=5)", place)]
    assert sweep == ["tool_hang", "kitchen_p1", "kitchen_p2", "kitchen_p3", "kitchen_p4"]


def test_cells_of_further_suites_stand_behind_those_of_the_first(tmp_path):
    """MSE loses 30 of 100 episodes, the cosine 20 in every suite; what the first suite has is not shown again."""
    lost = lambda name, place: lossy(30 if "mse" in name else 20)(name, place)  # noqa: E731
    make(tmp_path / "lift", "robosuite-lift-ph", lost)
    policy = make(tmp_path / "lift", "robosuite-lift-ph", lost, name="metrics")
    assert [item.suite.name for item in policy.suites] == [TABLES, "metrics"]
    lines = [line for line in render(page([policy])).splitlines() if line.startswith("| lift | lift |")]
    metrics = [line for line in lines if "| metrics: BAC (MSE) |" in line]
    assert len(metrics) == 1
    assert "| 1.00 / 1.00 | 100 | 0.70 [" in metrics[0]
    assert sum("main table: BAC(S = 10)" in line for line in lines) == 1
    assert "blockcache paper suite metrics" in render(page([policy]))


def test_the_protocol_takes_the_best_and_the_mean_of_each_run(tmp_path):
    """Two runs of two checkpoints: p1 is reached in all episodes but 0, 10, 20 and 40 of 100, and p2 in none."""
    for run, lost in (("seed0", (0, 10)), ("seed1", (20, 40))):
        for place, some in enumerate(lost):
            scores = lambda name, episode, some=some: 0.49 if episode >= some else 0.0  # noqa: E731
            make(tmp_path / "runs" / run, "block-pushing", scores, name=f"{place:04d}")
    found = TrainingRuns.load(str(tmp_path / "runs"))
    full = [row for row in found.rows if row[2] == "full precision"]
    assert [row[1] for row in full] == ["block pushing p1", "block pushing p2"]
    assert full[0][3:] == ["0.98 / 0.98", "1.00 / 0.95, 0.80 / 0.70", "0.90 / 0.82", "2 x 2 x 100"]
    assert full[1][4] == "0.00 / 0.00, 0.00 / 0.00"
    text = render(page([make(tmp_path / "lift", "robosuite-lift-ph", lossy(20))], [found]))
    assert "## By the paper's protocol" in text
    assert f"--checkpoints {tmp_path / 'runs'}" in text
    with pytest.raises(FileError, match="run 'blockcache paper checkpoints RUN"):
        TrainingRuns.load(str(tmp_path / "lift"))


def test_a_directory_without_results_says_what_to_run(tmp_path):
    with pytest.raises(FileError, match="run 'blockcache paper suite tables POLICY"):
        PolicyTable.load(str(tmp_path))


def test_the_suite_says_what_methods_do_to_actions_and_the_dropout(make_policy, tmp_path):
    assert TABLES in ALONE
    assert KINDS[TABLES].features
    policy = make_policy(sampler=DDPM(num_inference_steps=24), n_layer=3, p_drop_attn=0.3)
    counts = RolloutCounts(rollouts=2, main_rollouts=2, group=2, generations=3)
    setting = SuiteSetting(
        port_of(policy), "toy", observations(), tmp_path, counts, "tiny", "loop", make=Toy, progress=False
    )
    short = Suite(TABLES, "Without what is fitted.", None, (Cell("all", "full"), Cell("all", BASE)))
    results = SuiteRun(short, (setting.evaluation(short.methods, 2),)).run(progress=False)
    results.save(tmp_path / "tables.json")
    found = open_loop_of(Results.load(tmp_path / "tables.json"), "tables.json")
    assert found.dropout == 0.3
    assert set(found.features) == {BASE}
    assert found.features[BASE].shift > 0
    assert "dropout 0.3" in render(page([PolicyTable.load(str(tmp_path))]))
    damaged = {**results.setting, "open_loop": {"dropout": 0.3, "features": {BASE: {"shift": 1}}}}
    with pytest.raises(FileError, match="run the suite again"):
        open_loop_of(Results(**{**vars(results), "setting": damaged}), "tables.json")
