"""Replanning in a tuning: what of it is rolled out, when it is taken, what it costs, and what is written of it."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

import blockcache as bc
from blockcache.cli.tune import _written
from blockcache.compare import trials, tuner
from blockcache.compare.evaluation import prepare
from blockcache.compare.methods import parse_method
from blockcache.compare.replanning import replan
from blockcache.compare.tuned import Tuned, save_tuned
from blockcache.files import read
from blockcache.measure.distance import Distances
from blockcache.measure.statistics import Estimate
from blockcache.models.registry import port_of
from blockcache.report.overview.answer import find_answer
from blockcache.report.overview.sources import Source, Sources
from blockcache.report.tuning import tuning_blocks, tuning_chart
from blockcache.results.rollouts import FRESH_SEEDS
from blockcache.results.summary import summarise
from blockcache.results.tuning import Goal, Point, Tuning, front
from foreign_policy import Policy
from toy_task import SPEC

OBS = np.random.default_rng(0).standard_normal((30, 2, 5), dtype=np.float32)
GOAL = Goal(deadline_ms=3)


def estimate(mean, half=0.01):
    return Estimate(mean, mean - half, mean + half, 8)


def point(method="fitted-4", ms=2.0, rollouts=None, calls=1):
    zero = estimate(0.0)
    return Point(
        method, "onnx", 1, ms, 1.2 * ms, 10**9, 24, Distances(zero, zero, zero, zero), 0.0, rollouts, None, calls
    )


BEST = point(rollouts=estimate(-0.05))


def rolled(found, best=BEST, goal=GOAL, actions=8, rate_hz=10.0):
    """The points and the choice where methods are found to have these differences, and what was asked for."""
    asked = []

    def differences(points):
        asked.extend(point.method for point in points)
        return {method: found[method] for method in asked if method in found}

    points, chosen = replan([best], best, goal, actions, rate_hz, differences)
    assert points[0] == best
    assert [one.method for one in points[1:]] == asked
    return points, chosen, asked


# ---- what is rolled out


@pytest.mark.parametrize(("actions", "counts"), [(8, [4, 2]), (5, [2, 1]), (4, [2, 1]), (3, [1]), (2, [1]), (1, [])])
def test_half_and_a_quarter_of_the_executed_actions_are_tried(actions, counts):
    points, _, asked = rolled({}, actions=actions)
    assert asked == [f"fitted-4+replan={count}" for count in counts]
    assert [one.calls for one in points[1:]] == [actions / count for count in counts]


def test_the_policy_itself_can_replan_too():
    assert rolled({}, point("full"))[2] == ["replan=4", "replan=2"]


def test_nothing_is_rolled_out_where_it_cannot_be_chosen():
    assert rolled({}, goal=Goal(loss=0.1))[1:] == (BEST, [])  # the fastest never replans
    late = replace(BEST, p95_ms=3.01)
    assert rolled({}, late)[1:] == (late, [])  # nor does it help to keep a deadline


@pytest.mark.parametrize(("rate", "counts"), [(104.1, [4, 2]), (104.2, [4]), (208.3, [4]), (208.4, [])])
def test_a_call_ends_before_the_next_one_is_due(rate, counts):
    """2.4 ms, 104 to 208 times a second with two calls for each of the others."""
    assert rolled({}, rate_hz=rate)[2] == [f"fitted-4+replan={count}" for count in counts]


# ---- when it is taken


@pytest.mark.parametrize(
    ("half", "quarter", "chosen"),
    [
        (estimate(0.0, 0.049), None, "fitted-4+replan=4"),  # from -0.049 on: above -0.05
        (estimate(0.0, 0.051), None, "fitted-4"),  # it looks as much better, and may be worse
        (estimate(-0.06, 0.001), None, "fitted-4"),
        (estimate(0.0, 0.01), estimate(0.03, 0.01), "fitted-4+replan=2"),
        (estimate(0.0, 0.01), estimate(0.03, 0.09), "fitted-4+replan=4"),
        (estimate(0.02, 0.01), estimate(0.02, 0.01), "fitted-4+replan=4"),  # as good, for half as many calls
        (None, None, "fitted-4"),  # it could not be rolled out
    ],
)
def test_it_is_taken_only_if_its_whole_interval_is_better(half, quarter, chosen):
    found = {"fitted-4+replan=4": half, "fitted-4+replan=2": quarter}
    points, taken, _ = rolled({name: one for name, one in found.items() if one is not None})
    assert taken.method == chosen
    assert taken in points
    assert [one.rollouts for one in points[1:]] == [half, quarter]


# ---- what it costs


def test_all_calls_count_as_cost_and_each_keeps_the_deadline():
    twice, between = point("a+replan=4", 2.0, estimate(0.0), calls=2), point("b", 3.0, estimate(0.0))
    assert twice.cost_ms == 4.0
    assert min([twice, between], key=Goal(deadline_ms=9).order) is between  # as good, and 3 ms instead of 4
    assert GOAL.miss(twice) == 0  # 2.4 ms a call within 3, not 4.8
    assert front([twice, replace(between, rollouts=estimate(-0.1))])[0].method == "b"  # 3 ms: not beaten by 4
    assert front([twice, replace(between, p50_ms=4.1)]) == (twice,)


def tuning(*points, chosen=0, **changes):
    settings = {"setting": {}, "machine": {}, "plain_ms": 80.0, "fresh": estimate(0.0), "notes": ()} | changes
    policy = {"source": "x", "fingerprint": bc.Fingerprint().to_dict()}
    return Tuning(policy=policy, goal=GOAL, points=points, chosen=points[chosen], **settings)


def test_what_is_printed_is_the_cost_of_all_calls():
    found = tuning(point("fitted-4+replan=4", 2.0, estimate(0.0), calls=2), BEST)
    text, table, notes = tuning_blocks(found)
    assert (
        "The best within 3 ms is **fitted-4+replan=4** (onnx engine, 1 thread): 2 x 2.00 ms a chunk, 20x" in text.text
    )
    rows = [dict(zip((column.name for column in table.columns), row, strict=True)) for row in table.rows]
    heads = ("method", "p50 ms", "p95 ms", "over plain", "GFLOP")
    assert [tuple(row[head] for head in heads) for row in rows] == [
        ("fitted-4", "2.00", "2.40", "40x", "1.000"),
        ("fitted-4+replan=4", "2 x 2.00", "2 x 2.40", "20x", "2.000"),
    ]
    assert any("each call must keep the deadline" in item for item in notes.items)
    assert "This is another sampler than the policy's own." in notes.items
    (*_, star) = tuning_chart(found).panels[0].layers
    assert star.x == (4.8,)
    answer = find_answer(Sources(tunings=(Source("tuning.json", found),)))
    assert (answer.ms, answer.speed) == (4.0, 20.0)
    timed = SimpleNamespace(ms={"plain policy": 90.0, "fitted-4+replan=4": 1.5}.get, over=lambda *names: 60.0)
    rows = {"full": SimpleNamespace(method=SimpleNamespace(flops=8 * 10**9))}
    sources = {"tunings": (Source("tuning.json", found),), "typed": "POLICY", "name": ""}
    answer = find_answer(SimpleNamespace(rows=rows, timed=lambda: timed, **sources))
    assert (answer.ms, answer.plain, answer.speed, answer.share) == (
        3.0,
        90.0,
        30.0,
        0.25,
    )  # of 1.5 ms, and 2 of 8 GFLOP
    plain = tuning(BEST, point("ddpm-8"))
    assert not any("replan" in item for item in tuning_blocks(plain)[2].items)
    whole = tuning(point("replan=4", calls=2))
    assert "The sampler is the policy's own." in tuning_blocks(whole)[2].items
    bare = tuning(point("ddpm-8+replan=4", calls=2))
    assert "Plain fewer steps won: no schedule does better here." in tuning_blocks(bare)[2].items


def test_a_point_of_before_there_was_replanning_is_one_call():
    whole = asdict(point())
    del whole["calls"]
    assert read(Point, whole).calls == 1
    with pytest.raises(bc.BlockcacheError, match="1 or more"):
        read(Point, whole | {"calls": 0.5})


# ---- a whole tuning


@pytest.fixture
def run(monkeypatch, tmp_path, toy_by_name):
    """Tunes with full precision and three steps to choose from, in calls that are timed back to back."""
    for name, value in {"STEPS": (3,), "CHOSEN_STEPS": (), "OWN_BUDGETS": (), "BUDGETS": ()}.items():
        monkeypatch.setattr(tuner, name, value)
    for name, value in {"FIRST_SAMPLES": 4, "FINAL_SAMPLES": 6, "FIRST_CALLS": 1, "FINAL_CALLS": 2}.items():
        monkeypatch.setattr(trials, name, value)
    monkeypatch.setattr(trials, "cores", lambda: 1)
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    monkeypatch.setattr(tuner, "replan", lambda *given: replan(*given[:4], 0.001, given[5]))  # always fast enough

    def go(policy, **changes):
        settings = {"state": tmp_path / "state", "engine": "loop", "rate_hz": 1e4, "rollouts": 4, "task": "toy"}
        return tuner.tune(policy, OBS, **settings | changes, progress=False)

    return go


def difference(policy, tmp_path, method, first_seed):
    """By an evaluation of its own."""
    seeds = {"rollouts": 4, "first_seed": SPEC.first_test_seed + first_seed}
    evaluation = prepare(policy, "toy", [parse_method(method)], OBS, state=tmp_path / method, engine="loop", **seeds)
    return summarise(evaluation.run(progress=False))[1].difference


def test_with_a_deadline_the_best_is_rolled_out_again_and_the_winner_on_fresh_seeds(
    make_policy, run, tmp_path, monkeypatch
):
    policy, usual = make_policy(), tuner.replan

    def flattered(points, best, goal, actions, rate_hz, differences):
        """As found, but for half a chunk, which is said to win."""
        half = named(best.method, 2)
        return usual(points, best, goal, actions, rate_hz, lambda points: {**differences(points), half: estimate(0.5)})

    monkeypatch.setattr(tuner, "replan", flattered)
    found = run(policy, deadline_ms=1e4)
    points, chosen = {one.method: one for one in found.tuning.points}, found.tuning.chosen
    assert chosen.method.endswith("replan=2")
    assert (found.replan, chosen.calls, found.tuning.met) == (2, 2.0, True)
    quarter = points[chosen.method.replace("=2", "=1")]
    assert quarter.calls == 4
    assert quarter.rollouts == difference(policy, tmp_path, quarter.method, tuner.TUNING_SEEDS)
    assert found.tuning.fresh == difference(policy, tmp_path, chosen.method, FRESH_SEEDS)
    assert save_tuned(policy, found, tmp_path / "tuned") is True
    assert bc.load_policy(tmp_path / "tuned").n_action_steps == 2
    assert Tuning.load(tmp_path / "tuned" / "tuning.json").setting["replan"] == 2


def named(method, count):
    return str(parse_method(f"replan={count}" if method == "full" else f"{method}+replan={count}"))


@pytest.mark.parametrize("asked", [{"loss": 0.9}, {"deadline_ms": 1e4, "task": None}], ids=str)
def test_without_rollouts_or_a_deadline_nothing_replans(make_policy, run, tmp_path, asked):
    found = run(make_policy(), **asked)
    assert not any("replan" in one.method for one in found.tuning.points)
    save_tuned(make_policy(), found, tmp_path / "tuned")
    assert bc.load_policy(tmp_path / "tuned").n_action_steps == 4
    assert json.loads((tmp_path / "tuned" / "tuning.json").read_text())["setting"]["replan"] is None


# ---- what it says


def test_what_to_do_on_the_robot_is_said(make_policy, tmp_path):
    def lines(policy, method, name):
        source = SimpleNamespace(port=port_of(policy))
        return _written(source, Tuned(tuning(point(method)), None, None), tmp_path / name)

    assert lines(make_policy(), "replan=2", "own")[1:] == ["execute 2 actions of each chunk: Player(..., replan=2)"]
    assert lines(Policy(), "replan=2", "other")[2:] == [
        "execute 2 actions of each chunk: Player(..., replan=2); your own policy needs n_action_steps = 2 before it is "
        "accelerated or exported"
    ]
    assert len(lines(make_policy(), "full", "plain")) == 1
