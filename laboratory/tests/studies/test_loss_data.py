"""Losses predicted from features: what is learnt from data made by a known rule, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcache.errors import BlockcacheError
from blockcache.measure.features import ActionFeatures
from blockcache.measure.statistics import Estimate
from blockcache.report.markdown import render
from blockcache.results.check import verdict_of
from blockcache.results.losses import MOST, LossModel, predict_loss, shipped_model
from blockcache_lab.pages.losses import losses_document
from blockcache_lab.studies.loss_data import LossData, LossDataError, LossRow, judge, known_losses


def rule(beyond, rougher):
    return 0.15 * beyond + 0.12 * np.sqrt(max(0.0, rougher))


def row(task, beyond, rougher, *, factor=1.0, family="dp-t"):
    lost = factor * rule(beyond, rougher)
    return LossRow(
        task=task,
        family=family,
        policy=task,
        method=f"{beyond}, {rougher}",
        ran="0123456789abcdef",
        cost=1 / (1 + beyond),
        actions=8,
        features=ActionFeatures(0.0, beyond, -0.1, rougher, 0.1, 0.05),
        difference=Estimate(-lost, -lost - 0.02, 0.02 - lost, 99),
    )


def data(*factors, family="dp-t"):
    """A task for each factor, all by the same rule but for it."""
    draws = np.random.default_rng(1)
    return LossData(
        40,
        32,
        tuple(
            row(f"task {place}", *draws.uniform(0, 0.4, 2), factor=factor, family=family)
            for place, factor in enumerate(factors)
            for _ in range(20)
        ),
    )


def test_the_rule_that_made_the_data_is_found():
    model = data(1, 1, 1).model
    assert set(np.flatnonzero(model.vector > 1e-9)) <= {0, 7, 8}  # energy, and the root of roughness or of its ratio
    found = model.predict(ActionFeatures(0.3, 0.2, 0.0, 0.09, 0.1, 0.05), "dp-t", 8)
    assert "x energy beyond spread + " in model.formula
    assert (
        "family dp-t, executed actions of a chunk 8 (policies in the data 8 to 8), its actions' spread 0.1"
        in found.where
    )
    assert found.loss == pytest.approx(0.15 * 0.2 + 0.12 * 0.3)
    assert found.bound == pytest.approx(found.loss + 0.015)  # nothing is left over but the floor
    assert not found.unlike


def test_a_bound_holds_on_a_task_that_loses_more_than_the_others():
    judged = {one.task: one for one in judge(data(1, 1, 1, 2))}
    assert all(one.rank > 0.99 for one in judge(data(1, 1, 1, 1)))
    assert judged["task 3"].covered < 0.2  # nothing in the others told of it
    assert all(judged[f"task {place}"].covered > 0.9 for place in range(3))
    assert data(1, 1, 1, 2).model.factor > 1.2 > data(1, 1, 1, 1).model.factor  # known now, and allowed for


def test_what_is_promised_nothing_of_is_not_counted_as_covered():
    """The only policy of its family, left out: every method of it is unlike the rest."""
    made = data(1, 1, 1, 1)
    alone = replace(made, rows=tuple(replace(one, family="rdt") if one.task == "task 3" else one for one in made.rows))
    judged = {one.task: one for one in judge(alone)}
    assert (judged["task 3"].promised, judged["task 3"].covered) == (0, None)
    assert judged["task 3"].rank > 0.99  # it is ordered all the same
    assert judged["task 0"].promised == 20
    assert "over the 3 tasks of which something is promised" in render(losses_document(alone))


def test_how_much_more_than_most_is_lost_changes_nothing():
    """A task where everything is lost by some methods, beside one where they lose as much as counts."""
    all_lost = LossData(
        40, 32, tuple(replace(one, difference=lost(1.0)) if bad(one) else one for one in data(1, 1, 1).rows)
    )
    some_lost = LossData(
        40, 32, tuple(replace(one, difference=lost(MOST)) if bad(one) else one for one in all_lost.rows)
    )
    assert all_lost.model == some_lost.model
    assert judge(all_lost)[0].error == judge(some_lost)[0].error
    model = all_lost.model
    assert model.bound(0.1) == pytest.approx(model.factor * 0.115)
    assert model.bound(MOST) == 1.0
    worst = model.predict(ActionFeatures(0.3, 3.0, 0.0, 3.0, 0.1, 0.05), "dp-t", 8)
    assert worst.words == "nothing is promised: it may well lose more than 0.3"


def test_nothing_is_learnt_from_chunks_without_a_roughness():
    short = tuple(replace(one, task="short", actions=2) for one in data(2).rows)
    with_short = LossData(40, 32, (*data(1, 1, 1).rows, *short))
    assert with_short.model == data(1, 1, 1).model
    assert "short" not in with_short.told


def bad(one):
    return one.lost > 0.08


def lost(value):
    return Estimate(-value, -value - 0.02, 0.02 - value, 99)


def test_what_a_bound_would_take_on_a_task_that_was_left_out():
    easy = [row(f"task {place}", 0.003, 0.0) for place in range(3)]  # as good as lossless, and at a lower cost
    judged = {one.task: one for one in judge(LossData(40, 32, (*data(1, 1, 1).rows, *easy)))}
    assert [one.taken[0].method for one in judged.values()] == ["0.003, 0.0"] * 3
    assert all(one.taken[0] is None for one in judge(data(1, 1, 1)))


@given(st.floats(-0.1, 1), st.floats(-0.1, 1), st.floats(0, 0.5), st.floats(0, 0.5))
def test_more_of_anything_bad_never_predicts_less(beyond, rougher, more_energy, more_rough):
    model = data(1, 0.7, 1.5).model
    less = ActionFeatures(0.0, beyond, 0.0, rougher, 0.1, 0.05)
    more = replace(less, beyond_spread=beyond + more_energy, rougher=rougher + more_rough)
    one, other = (model.predict(features, "dp-t", 8) for features in (less, more))
    assert 0 <= one.loss <= other.loss <= 1
    assert one.loss <= one.bound <= other.bound <= 1


def test_a_task_on_which_hardly_anything_loses_teaches_nothing():
    quiet = [row("quiet", 0.3, 0.3, factor=0.0) for _ in range(5)] + [row("quiet", 0.3, 0.3)] * 2
    found = LossData(40, 32, (*data(1, 1, 1).rows, *quiet))
    assert set(found.told) == {"task 0", "task 1", "task 2"}
    np.testing.assert_allclose(found.model.vector, data(1, 1, 1).model.vector, atol=1e-9)


def test_a_task_and_its_variants_are_left_out_together():
    rows = data(1, 1, 1).rows
    harder = tuple(replace(row, task="task 0@steps=9") for row in rows[:20])
    assert {task: len(found) for task, found in LossData(40, 32, (*rows, *harder)).told.items()} == {
        "task 0": 40, "task 1": 20, "task 2": 20,
    }  # fmt: skip
    names = ("pusht", "pusht-image", "robosuite-can-ph@steps=9", "robosuite-can-mh", "robosuite-lift-ph")
    seen = tuple(replace(row, task=name) for name in names for row in rows[:20])
    assert {task: len(found) for task, found in LossData(40, 32, seen).told.items()} == {
        "pusht": 40, "robosuite-can-ph@steps=9": 40, "robosuite-lift-ph": 20,
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_tasks_are_refused(count):
    with pytest.raises(LossDataError, match=rf"needs 3 tasks that tell methods apart, got {count} \(task 0"):
        data(*[1] * count).model  # noqa: B018
    assert len(judge(data(1, 1, 1))) == 3  # two are left to learn from


@pytest.mark.parametrize(
    ("family", "actions", "change", "reason"),
    [
        ("rdt", 8, {}, "no policy of family rdt is in the data, only dp-t"),
        ("dp-t", 2, {}, "a chunk of 2 has no roughness"),
        ("dp-t", 4, {}, "executed actions of a chunk: 4, of policies in the data 8 to 8"),
        ("dp-t", 16, {}, "executed actions of a chunk: 16, of policies in the data 8 to 8"),
        ("dp-t", 64, {}, "executed actions of a chunk: 64, of policies in the data 8 to 8"),
        ("dp-t", 8, {"own_spread": 0.001}, "spread: 0.001, of policies in the data 0.1 to 0.1"),
        ("dp-t", 8, {"own_roughness": 1.0}, "roughness: 1, of policies in the data 0.05 to 0.05"),
    ],
)
def test_a_policy_unlike_the_data_gets_no_bound(family, actions, change, reason):
    features = replace(ActionFeatures(0.0, 0.0, 0.0, 0.0, 0.1, 0.05), **change)
    found = data(1, 1, 1).model.predict(features, family, actions)
    assert found.bound is None
    assert reason in found.unlike


def of_family(made, family, *tasks):
    return replace(made, rows=tuple(replace(one, family=family) if one.task in tasks else one for one in made.rows))


def test_a_bound_is_promised_of_families_that_several_tasks_tell_of():
    """What a single task tells of a family helps to predict, but no bound of the family could be judged without it."""
    features = ActionFeatures(0.0, 0.1, 0.0, 0.1, 0.1, 0.05)
    alone = of_family(data(1, 1, 1, 1), "rdt", "task 3").model
    assert alone.tasks == {"dp-t": 3, "rdt": 1}
    np.testing.assert_allclose(alone.vector, data(1, 1, 1, 1).model.vector)
    found = alone.predict(features, "rdt", 8)
    assert found.words == (
        "nothing is promised: family rdt is in the data on a single task, so no bound of it could be judged"
    )
    assert alone.predict(features, "dp-t", 8) == replace(found, bound=alone.bound(found.loss), unlike="", where=(
        found.where.replace("family rdt", "family dp-t")
    ))  # fmt: skip
    assert alone.judged.startswith("A bound is promised only of family dp-t: ")
    both = of_family(data(1, 1, 1, 1), "rdt", "task 2", "task 3")
    assert both.model.predict(features, "rdt", 8).bound is not None
    assert {one.task: one.promised for one in judge(both)} == dict.fromkeys(both.told, 20)  # each by the other
    assert "promised only of family dp-t: it was judged" in render(losses_document(of_family(both, "dit", "task 3")))


def test_a_model_that_does_not_say_how_many_tasks_promises_nothing(tmp_path):
    made = data(1, 1, 1).model
    file = tmp_path / "model.json"
    made.save(file)
    content = json.loads(file.read_text())
    del content["tasks"]
    file.write_text(json.dumps(content))
    old = LossModel.load(file)
    assert old == replace(made, tasks={})
    found = old.predict(ActionFeatures(0.0, 0.1, 0.0, 0.1, 0.1, 0.05), "dp-t", 8)
    assert found.loss > 0
    assert found.words.startswith("nothing is promised: the model does not say on how many tasks")
    with pytest.raises(ValueError, match="its tasks are of the families dp-t, each with their number"):
        replace(made, tasks={"rdt": 2})


def test_a_task_left_out_is_judged_with_a_factor_of_its_own_and_with_that_of_all():
    made = data(1, 1, 1, 2)
    judged = {one.task: one for one in judge(made)}
    odd = judged["task 3"]  # nothing in the others told of it, so they bound it too low; all of them together do not
    assert odd.factor < made.model.factor
    assert odd.covered < odd.shipped
    page = render(losses_document(made))
    assert f"{odd.factor:.2f} | {odd.promised} | {odd.covered:.2f} | {odd.shipped:.2f}" in page
    assert f"in place of the {made.model.factor:.2f} that ships" in page


def test_verdicts_are_held_against_rollouts():
    """Twenty methods a task, which lose by one rule: what it says of each is by the same limits as in `check`."""
    made = data(1, 1, 1)
    fine = [row(f"task {place}", 0.0, 0.0) for place in range(3)]  # nothing is lost: -0.02 to 0.02
    bare = [replace(row("task 0", 0.0, 0.0), family="dit", difference=lost(0.03))]
    page = render(losses_document(LossData(40, 32, (*made.rows, *fine, *bare))))
    rows = {
        line.split(" | ")[0]: line.strip(" |").split(" | ")[1:] for line in page.splitlines() if line.count(" | ") == 6
    }
    counts = {verdict.strip("| "): list(map(int, found)) for verdict, found in rows.items() if found[0].isdigit()}
    assert sum(sum(found[:3]) for found in counts.values()) == 64 == sum(sum(found[3:]) for found in counts.values())
    assert counts["looks lossless"][:3] == [3, 0, 0]
    assert counts["cannot be told"] == [0, 1, 0] * 2
    assert counts["do not use"][1] > 20


def test_what_was_measured_on_too_little_gets_no_bound():
    features, model = ActionFeatures(0.0, 0.0, 0.0, 0.0, 0.1, 0.05), data(1, 1, 1).model
    assert model.predict(features, "dp-t", 8, 320).bound is not None
    found = model.predict(features, "dp-t", 8, 319)
    assert found.bound is None
    assert found.words.startswith("nothing is promised: it was measured on 319 chunks, methods in the data on 1280")


def test_a_file_gives_back_what_was_saved(tmp_path):
    made = data(1, 1, 2)
    made.save(tmp_path / "losses.json")
    assert LossData.load(tmp_path / "losses.json") == made
    made.model.save(tmp_path / "model.json")
    assert LossModel.load(tmp_path / "model.json") == made.model


def test_the_shipped_model_is_that_of_the_known_losses():
    """`blockcache paper losses ... --render-only --model library/src/blockcache/assets/loss-model.json` writes it."""
    shipped, made = shipped_model(), known_losses().model
    assert shipped.about == made.about
    assert (shipped.chunks, shipped.families, shipped.ranges) == (made.chunks, made.families, made.ranges)
    assert shipped.tasks == made.tasks
    np.testing.assert_allclose(shipped.vector, made.vector, rtol=1e-6, atol=1e-9)
    assert shipped.factor == pytest.approx(made.factor)


@pytest.mark.parametrize("value", ["NaN", "1e999", "null"])
def test_features_of_a_file_that_are_not_finite_are_refused(tmp_path, value):
    data(1, 1, 2).save(tmp_path / "losses.json")
    text = (tmp_path / "losses.json").read_text()
    (tmp_path / "losses.json").write_text(text.replace('"wider": -0.1', f'"wider": {value}', 1))
    with pytest.raises(BlockcacheError, match=r"losses\.json") as caught:
        LossData.load(tmp_path / "losses.json")
    assert "\n" not in str(caught.value)


def test_the_shipped_data_tell_what_reuse_costs_on_push_t():
    rows = {(one.task, one.method): one for one in known_losses().rows}
    for method in ("uniform:S=27", "uniform:S=20"):  # chunks several times as rough as the policy's own
        found = rows["pusht", method]
        assert found.difference.high < -0.04
        predicted = predict_loss(found.features, found.family, found.actions)
        assert predicted.loss > 0.04
        assert predicted.bound > 0.1
        assert verdict_of(0, predicted) == "do not use"  # whatever the distances say
    fine = rows["pusht", "ddpm-16"]
    predicted = predict_loss(fine.features, fine.family, fine.actions)
    assert predicted.loss < 0.04
    assert verdict_of(0, predicted) == "looks lossless"
    few = rows["pusht", "action:budget=0.1679"]  # smooth and near, and its whole interval lies below 0
    assert verdict_of(0, predict_loss(few.features, few.family, few.actions)) == "will likely cost score"
    assert fine.difference.low > -0.03
