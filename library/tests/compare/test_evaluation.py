"""Paired evaluation on a toy task: what is measured, results files, and what is refused."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from blockcache.compare.evaluation import prepare
from blockcache.compare.jobs import EvaluationError, local_workers, one_by_one, ray_cluster
from blockcache.compare.methods import MethodError
from blockcache.compare.paired import _record, rollout_noise
from blockcache.errors import FileError, TaskError
from blockcache.results.rollouts import Record, Results
from blockcache.results.summary import summarise
from blockcache.samplers import DDPM, table
from blockcache.tasks import Rollout
from blockcache.tasks.video import check_video
from toy_evaluation import METHODS, ready
from toy_task import Toy, observations

# ---- what is measured


def test_there_is_a_record_for_each_method_and_seed(results):
    assert [method.name for method in results.methods] == ["full", *METHODS]
    assert [(record.method, record.seed) for record in results.records] == [
        (name, seed) for name in ("full", *METHODS) for seed in range(6)
    ]
    assert all(record.steps == 9 and record.error is None and record.jerk > 0 for record in results.records)
    assert results.failed == 0
    assert len({record.score for record in results.records}) == 24


def test_methods_say_how_they_ran(results):
    full, uniform, ddim, teacache = results.methods
    assert [method.engine for method in results.methods] == ["loop", "loop", "loop", "patched"]
    assert [method.shares_all_noise for method in results.methods] == [True, True, False, True]
    assert (full.reuse, full.reused, full.error.mean < 1e-4) == (None, 0.0, True)
    assert set(map(tuple, uniform.reuse["updates"].values())) == {(0, 2, 4)}
    assert (uniform.reused, ddim.flops) == (0.5, full.flops // 2)
    assert ddim.sampler["type"] == "ddim"
    assert teacache.reuse["threshold"] == 0.5
    assert uniform.flops < full.flops > teacache.flops
    assert results.noise_floor.mean > 0.01
    assert results.policy["source"] == "tiny"


def test_every_method_sees_the_noise_of_its_seed_chunk_and_step():
    full, fewer = (
        table(DDPM(num_inference_steps=6)),
        table(DDPM(num_inference_steps=3)),
    )
    noise = rollout_noise((7, 8, 9), 1, full, (4, 2))
    assert noise.shape == (6, 3, 4, 2)  # the start, and five of six steps
    assert np.array_equal(rollout_noise((8,), 1, full, (4, 2))[:, 0], noise[:, 1])  # not the group's or the place's
    assert len(np.unique(noise)) == noise.size
    assert not np.isin(rollout_noise((7, 8, 9), 2, full, (4, 2)), noise).any()
    other = rollout_noise((7, 8, 9), 1, fewer, (4, 2))
    assert np.array_equal(other[0], noise[0])
    assert not np.isin(other[1:], noise).any()
    drawn = rollout_noise(range(200), 0, full, (4, 2))
    assert abs(drawn.mean()) < 0.05
    assert abs(drawn.std() - 1) < 0.05


def test_a_rollout_without_reuse_is_that_of_the_plain_policy(make_policy, results):
    """By hand, with the policy's own sampler: what full precision must come to."""
    policy = make_policy()
    toy = Toy()
    seen = [toy.reset(4)] * 2
    sampler = table(policy.sampler)
    for chunk in range(3):
        noise = torch.from_numpy(rollout_noise((4,), chunk, sampler, (6, 3)))
        for action in policy.predict_action(np.stack(seen)[None], noise=noise)["action"][0].numpy():
            if not toy.done:
                toy.step(action)
                seen = [seen[1], toy.observe()]
    assert results.of("full")[4].score == pytest.approx(toy.score, abs=1e-5)
    assert results.of("ddim-3")[4].score != pytest.approx(toy.score, abs=1e-5)


def test_smoothness_is_in_normalised_units():
    actions = np.array([[0.0], [1.0], [8.0], [27.0], [64.0], [125.0]])
    record = _record(Rollout(0, 0.5, True, 6, None, actions), np.array([0.5]), chunk=2)
    assert record["jerk"] == pytest.approx(6 * 0.5)
    assert record["jump"] == pytest.approx((7 + 37) / 2 * 0.5)


def test_the_table_has_a_row_for_each_method(results):
    full, uniform, *_ = summarise(results)
    assert full.difference is None
    assert full.discordant is None
    scores = {
        name: np.array([record.score for record in results.of(name).values()]) for name in ("full", "uniform:S=3")
    }
    assert full.score.mean == pytest.approx(scores["full"].mean())
    assert uniform.difference.mean == pytest.approx((scores["uniform:S=3"] - scores["full"]).mean())
    assert uniform.difference.n == 6


def test_pairs_with_a_failure_are_left_out_of_the_comparison(results):
    records = [
        Record("full", 0, 0.5, True, 3, None, None, None),
        Record("full", 1, None, None, 2, "RuntimeError: x", None, None),
        Record("full", 2, 0.1, False, 3, None, None, None),
        Record("uniform:S=3", 0, 0.7, True, 3, None, 2.0, 1.0),
        Record("uniform:S=3", 1, 0.9, True, 3, None, 4.0, None),
        Record("uniform:S=3", 2, 0.2, True, 3, None, None, None),
    ]
    changed = Results(**vars(results) | {"methods": results.methods[:2], "records": tuple(records)})
    full, uniform = summarise(changed)
    assert (full.failed, full.score.n, uniform.failed, uniform.score.n) == (1, 2, 0, 3)
    assert uniform.difference.n == 2
    assert uniform.difference.mean == pytest.approx(0.15)
    assert (uniform.discordant.only_found, uniform.discordant.only_baseline) == (1, 0)
    assert (uniform.jerk, uniform.jump) == (3.0, 1.0)
    assert changed.failed == 1


# ---- a simulator that fails


def test_a_rollout_that_fails_is_recorded_and_the_others_go_on(make_policy, results, tmp_path):
    run = ready(make_policy(), tmp_path / "state", partial(Toy, fails={2: 5, 5: 0}))
    found = run.run(progress=False)
    assert found.failed == 8
    assert found.of("full")[2].error == "RuntimeError: the table broke"
    assert (found.of("full")[2].score, found.of("full")[2].steps, found.of("ddim-3")[5].steps) == (None, 5, 0)
    for name in ("full", *METHODS):
        assert [found.of(name)[seed] for seed in (0, 1, 3, 4)] == [results.of(name)[seed] for seed in (0, 1, 3, 4)]
    found.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == found


def test_failed_rollouts_are_tried_again(make_policy, reference, tmp_path):
    assert ready(make_policy(), tmp_path / "state", partial(Toy, fails={2: 5})).run(progress=False).failed == 4
    ready(make_policy(), tmp_path / "state").run(progress=False).save(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_bytes() == reference


# ---- results files


def test_results_files_are_strict(results, tmp_path):
    results.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "reference.json").read_bytes()
    value = json.loads((tmp_path / "again.json").read_text())
    assert b"timing" not in (tmp_path / "again.json").read_bytes()

    def refused(match, **changes):
        (tmp_path / "bad.json").write_text(json.dumps(value | changes))
        with pytest.raises(FileError, match=match):
            Results.load(tmp_path / "bad.json")

    refused("version 2", version=2)
    refused("not a results file", format="blockcache.schedule")
    refused("unknown keys: extra", extra=1)
    scoreless = {key: item for key, item in value["records"][0].items() if key != "score"}
    refused("unknown keys under 'records.0.': score", records=[scoreless])
    refused("either a score", records=[value["records"][0] | {"score": None}])
    refused("unknown keys under 'methods.0.': when", methods=[value["methods"][0] | {"when": "now"}])
    refused("garbled", methods=[3])
    refused("garbled", noise_floor=None)
    for policy in ({}, {"source": "toy", "fingerprint": {}}):
        refused(r"the results file .*bad\.json is garbled .*fingerprint", policy=policy)


def test_results_of_another_policy_or_schedule_are_not_overwritten(make_policy, results, tmp_path):
    path = tmp_path / "results.json"
    results.save(path)
    ready(make_policy(), tmp_path / "state").check_output(path)
    ready(make_policy(), tmp_path / "state", methods=(*METHODS, "uniform:S=2"), rollouts=8).check_output(path)
    with pytest.raises(EvaluationError, match=r"another policy .weights .* instead of .*write to another file"):
        ready(make_policy(seed=1), tmp_path / "state").check_output(path)
    with pytest.raises(EvaluationError, match="under the name full"):
        ready(make_policy(), tmp_path / "state", engine="patched").check_output(path)
    other = Results(**vars(results) | {"task": dict(results.task) | {"name": "pusht"}})
    other.save(path)
    with pytest.raises(EvaluationError, match="task pusht instead of toy"):
        ready(make_policy(), tmp_path / "state").check_output(path)
    schedule = tmp_path / "mine.json"
    for steps in (3, 2):  # the same name, but the file has changed in between
        calibrated = ready(make_policy(), tmp_path / "state", methods=(f"uniform:S={steps}",))
        calibrated.candidates[f"uniform:S={steps}"].strategy.save(schedule)
        run = ready(make_policy(), tmp_path / "state", methods=(str(schedule),), rollouts=1, group=1)
        if steps == 3:
            run.run(progress=False).save(path := tmp_path / "file.json")
    with pytest.raises(EvaluationError, match=r"another schedule, sampler or engine under the name .*mine.json"):
        run.check_output(path)


def test_rollouts_that_the_new_results_would_not_have_are_not_overwritten(make_policy, results, tmp_path):
    path = tmp_path / "results.json"
    results.save(path)
    before = path.read_bytes()
    with pytest.raises(
        EvaluationError, match=r"holds 16 rollouts that would be lost .of full, uniform:S=3, ddim-3, tea"
    ):
        ready(make_policy(), tmp_path / "state", rollouts=2).check_output(path)
    with pytest.raises(EvaluationError, match=r"holds 6 rollouts that would be lost .of ddim-3.; ask for as many"):
        ready(make_policy(), tmp_path / "state", methods=(METHODS[0], METHODS[2])).check_output(path)
    assert path.read_bytes() == before


# ---- refused


def test_refused_before_any_work(make_policy, tmp_path):
    policy = make_policy()
    with pytest.raises(EvaluationError, match="at least one rollout"):
        ready(policy, tmp_path, rollouts=0)
    with pytest.raises(MethodError, match="unknown method 'bca'"):
        ready(policy, tmp_path, methods=("bca",))
    with pytest.raises(TaskError, match="observations have 4 numbers, the task's 5"):
        ready(make_policy(obs_dim=4), tmp_path)
    with pytest.raises(TaskError, match="actions have 2 numbers, the task's 3"):
        ready(make_policy(action_dim=2), tmp_path)
    with pytest.raises(EvaluationError, match="seeds are 0 or more"):
        ready(policy, tmp_path, first_seed=-1)
    with pytest.raises(EvaluationError, match="leave nothing of 12 observations"):
        ready(policy, tmp_path, generations=12)
    with pytest.raises(TaskError, match="unknown task 'toy'"):
        prepare(policy, "toy", (), observations(), state=tmp_path)
    with pytest.raises(TaskError, match="20"):
        prepare(policy, "pusht", (), observations(), state=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_libraries_are_named_with_their_extra(monkeypatch):
    monkeypatch.setattr("blockcache.extras.find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"blockcache\[ray\]"):
        ray_cluster("auto")
    with pytest.raises(EvaluationError, match=r"blockcache\[eval\]"):
        local_workers(2)
    assert local_workers(1) is local_workers(None) is one_by_one
    with pytest.raises(FileError, match=r"blockcache\[video\]"):
        check_video("x.gif")
