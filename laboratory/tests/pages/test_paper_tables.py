"""The page of the paper's tables: its cells and sentences follow from records that are made by hand."""

from dataclasses import asdict

import pytest

from blockcache.errors import FileError
from blockcache.measure.action_error import ActionError
from blockcache.measure.features import ActionFeatures
from blockcache.models.registry import port_of
from blockcache.report.markdown import render
from blockcache.results.rollouts import MethodRun, Record, Results
from blockcache.samplers import DDPM
from blockcache_lab.pages.published import PLACES, printed_cell
from blockcache_lab.pages.tables import PolicyTable, findings, page
from blockcache_lab.studies.open_loop import open_loop_of
from blockcache_lab.studies.suite_runs import RolloutCounts, SuiteRun, SuiteSetting
from blockcache_lab.studies.suites import ALONE, BASE, KINDS, TABLES, Cell, Suite, suite_by_name
from toy_task import Toy, observations

OWN = {"type": "ddpm", "num_inference_steps": 100, "num_train_timesteps": 100}
EPISODES = 100


def make(directory, task, scores, dropout=0.0, jerks=(0.1, 0.1), shift=0.07):
    """`scores` gives a method's score of an episode by its place; `jerks` are of full precision and of all else."""
    suite = suite_by_name(TABLES, lambda kind, method: f"{kind}-16")
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
    }
    fingerprint = {"family": "dp-t", "blocks": ["layers.0.SA"], "widths": {"width": 64}, "steps": 100, "sampler": OWN}
    directory.mkdir()
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
    ).save(directory / f"{TABLES}.json")
    return PolicyTable.load(str(directory))


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
    assert "BAC's centre shift is smaller on 0 of 1 tasks, what it adds to the roughness on 0" in dropout
    assert findings(three[:1])[1] == "**Dropout**: no task has policies with it and without."


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
        line.split("|")[2].strip(): line.split("|")[6].split("[")[0].strip() for line in blocks if "Full" in line
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
                assert all(0 <= value <= 1 for value in printed_cell(row, place))


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
