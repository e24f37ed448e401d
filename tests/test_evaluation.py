"""Paired evaluation on a toy task: the same records whoever runs it and however often it is interrupted."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from blockcache.errors import FileError, TaskError
from blockcache.experiments import jobs
from blockcache.experiments.evaluation import prepare
from blockcache.experiments.jobs import EvaluationError, Store, local_workers, one_by_one, ray_cluster, run_jobs
from blockcache.experiments.methods import MethodError
from blockcache.experiments.paired import _record, one_thread, rollout_noise
from blockcache.experiments.results import Record, Results
from blockcache.experiments.summary import summarise
from blockcache.experiments.video import check_video, write_video
from blockcache.policies import save_policy
from blockcache.samplers import SamplerConfig, table
from blockcache.tasks import Rollout, TaskSpec
from toy_task import SPEC, Toy, observations

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
METHODS = ("uniform:S=3", "ddim-3", "teacache:threshold=0.5")


def ready(policy, state, make=Toy, methods=METHODS, rollouts=6, group=2, **others):
    settings = {"first_seed": 0, "generations": 4, "engine": "loop", "progress": False, "source": "tiny"}
    return prepare(
        policy,
        "toy",
        methods,
        observations(),
        state=state,
        rollouts=rollouts,
        group=group,
        make=make,
        **settings | others,
    )


def evaluate_here(directory, slow):
    """What the tests start in a process of its own, to kill it."""
    from conftest import tiny_policy

    run = ready(tiny_policy(), Path(directory) / "results.state", partial(Toy, slow=slow))
    run.run(progress=False).save(Path(directory) / "results.json")


@pytest.fixture(scope="module")
def reference(make_policy, tmp_path_factory):
    """The file of an evaluation that was never interrupted, by one process."""
    directory = tmp_path_factory.mktemp("reference")
    ready(make_policy(), directory / "state").run(progress=False).save(directory / "results.json")
    return (directory / "results.json").read_bytes()


@pytest.fixture
def results(reference, tmp_path):
    (tmp_path / "reference.json").write_bytes(reference)
    return Results.load(tmp_path / "reference.json")


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
        table(SamplerConfig("ddpm", num_inference_steps=6)),
        table(SamplerConfig("ddpm", num_inference_steps=3)),
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


# ---- the same, whoever runs it


def test_two_workers_give_the_same_file(make_policy, reference, tmp_path):
    run = ready(make_policy(), tmp_path / "state")
    run.run(local_workers(2), progress=False).save(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_bytes() == reference


@pytest.fixture
def found_by_ray(monkeypatch):
    """Ray's workers have to find this file and the toy."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@needs_ray
def test_a_local_ray_gives_the_same_file(make_policy, reference, tmp_path, found_by_ray):
    run = ready(make_policy(), tmp_path / "state")
    run.run(ray_cluster("local"), progress=False).save(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_bytes() == reference


def misfit(job):
    raise TaskError(f"no such place as {job}")


def die(job):
    os.kill(os.getpid(), signal.SIGKILL)


@needs_ray
def test_errors_and_deaths_of_ray_workers_come_back_as_sentences(found_by_ray):
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(TaskError, match=r"^no such place as home$"):
            list(ray_cluster("local")(misfit, ["home"]))
        with pytest.raises(EvaluationError, match="worker was killed"):
            list(ray_cluster("local")(die, ["home"]))
        assert ray.is_initialized()  # it was not ours to shut down
    finally:
        ray.shutdown()


def test_threads_are_put_back():
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# ---- interrupted


def test_a_killed_evaluation_resumed_gives_the_same_file(make_policy, reference, tmp_path):
    state = tmp_path / "results.state"
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_evaluation as here; "
    command = [sys.executable, "-c", code + f"here.evaluate_here({str(tmp_path)!r}, slow=0.05)"]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while not (kept := len(list(state.glob("*.json")))) or kept < 8:  # 6 open-loop jobs come first
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept = {path: path.read_bytes() for path in state.glob("*.json")}
    assert 8 <= len(kept) < 18
    assert not (tmp_path / "results.json").exists()
    evaluation = ready(make_policy(), state)
    evaluation.run(progress=False).save(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_bytes() == reference
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(list(state.glob("*.json"))) == 18


def test_a_killed_worker_ends_the_run_with_a_sentence_and_what_is_finished_stays(make_policy, reference, tmp_path):
    flag, state = tmp_path / "kill", tmp_path / "state"
    flag.touch()
    run = ready(make_policy(), state, partial(Toy, kill=str(flag)))
    with pytest.raises(EvaluationError, match=r"worker was killed.*the same command goes on"):
        run.run(local_workers(2), progress=False)
    kept = len(list(state.glob("*.json")))
    assert 0 < kept < 18
    flag.unlink()
    run.run(progress=False).save(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_bytes() == reference


def test_finished_jobs_are_not_run_again(tmp_path):
    ran = []

    def work(job):
        ran.append(job)
        if job == "three":
            raise KeyboardInterrupt
        return {"value": job * 2}

    named = {"a" * 64: "one", "b" * 64: "two", "c" * 64: "three"}
    with pytest.raises(KeyboardInterrupt):
        run_jobs(work, named, Store(tmp_path), one_by_one, progress=False)
    assert ran == ["one", "two", "three"]
    del named["c" * 64]
    found = run_jobs(work, named, Store(tmp_path), one_by_one, progress=False)
    assert found == {"a" * 64: {"value": "oneone"}, "b" * 64: {"value": "twotwo"}}
    assert ran == ["one", "two", "three"]


def test_a_kept_job_that_is_not_what_its_name_says_is_refused(tmp_path):
    store = Store(tmp_path)
    store.put("a" * 64, {"value": 1})
    (tmp_path / f"{'a' * 32}.json").rename(tmp_path / f"{'b' * 32}.json")
    with pytest.raises(FileError, match="delete it"):
        store.get("b" * 64)


def test_nothing_that_counts_is_left_out_of_the_key(make_policy, tmp_path):
    def keys(policy=None, **changes):
        run = ready(
            policy or make_policy(), tmp_path / "state", **{"methods": ("uniform:S=3",), "rollouts": 2, **changes}
        )
        return {run._key(job) for job in run._jobs() if hasattr(job, "seeds")}

    first = keys()
    assert keys() == first
    assert len(first) == 2
    for changed in (
        keys(make_policy(seed=1)),
        keys(make_policy(n_action_steps=3)),
        keys(first_seed=2),
        keys(engine="patched"),
        keys(make=partial(Toy, TaskSpec(**vars(SPEC) | {"max_steps": 8}))),
        keys(rollouts=3, group=3),
    ):
        assert not changed & first
    assert len(keys(methods=("uniform:S=2",)) & first) == 1  # full is the same
    assert keys(rollouts=4) > first  # more of the same goes on from what there is


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
    refused("unknown in Results: extra", extra=1)
    refused("unknown in Record: score", records=[{k: v for k, v in value["records"][0].items() if k != "score"}])
    refused("either a score", records=[value["records"][0] | {"score": None}])
    refused("unknown in MethodRun", methods=[value["methods"][0] | {"when": "now"}])
    refused("garbled", methods=[3])
    refused("garbled", noise_floor=None)


def test_results_of_another_policy_or_schedule_are_not_overwritten(make_policy, results, tmp_path):
    path = tmp_path / "results.json"
    results.save(path)
    ready(make_policy(), tmp_path / "state").check_output(path)
    ready(make_policy(), tmp_path / "state", methods=("uniform:S=2",), rollouts=2).check_output(path)
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
        calibrated.candidates[f"uniform:S={steps}"].schedule.save(schedule)
        run = ready(make_policy(), tmp_path / "state", methods=(str(schedule),), rollouts=1, group=1)
        if steps == 3:
            run.run(progress=False).save(path := tmp_path / "file.json")
    with pytest.raises(EvaluationError, match=r"another schedule, sampler or engine under the name .*mine.json"):
        run.check_output(path)


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
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"blockcache\[ray\]"):
        ray_cluster("auto")
    with pytest.raises(EvaluationError, match=r"blockcache\[eval\]"):
        local_workers(2)
    assert local_workers(1) is local_workers(None) is one_by_one
    with pytest.raises(FileError, match=r"blockcache\[plots\]"):
        check_video("x.gif")


# ---- the verb


@pytest.fixture
def shell(make_policy, tmp_path, monkeypatch, toy_by_name, command):
    """Runs `blockcache eval` on the toy task."""
    save_policy(make_policy(), tmp_path / "policy")
    np.savez(tmp_path / "obs.npz", obs=observations().numpy())
    monkeypatch.chdir(tmp_path)
    fixed = "--observations obs.npz --generations 4 --rollouts 2 --group 2 --seed 0 --workers 1 --repeats 1"
    return lambda *arguments, task="toy": command("eval", task, "policy", *fixed.split(), *arguments)


def test_the_verb_writes_results_timings_and_a_table(shell, tmp_path):
    code, out, _ = shell("-m", "uniform:S=3", "-m", "ddim-3", "--engine", "patched", "-o", "deep/results.json")
    assert code == 0
    found = Results.load(tmp_path / "deep" / "results.json")
    assert [method.engine for method in found.methods] == ["patched"] * 3
    timings = json.loads((tmp_path / "deep" / "results.timings.json").read_text())
    assert set(timings["methods"]) == {"plain policy", "full", "uniform:S=3", "ddim-3"}
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("full", "uniform:S=3", "ddim-3")] == 2 * [
        "full",
        "uniform:S=3",
        "ddim-3",
    ]
    (ddim,) = [line for line in out.splitlines() if line.startswith("ddim-3") and "start only" in line]
    assert f"{np.mean([record.score for record in found.of('ddim-3').values()]):.3f}" in ddim
    assert "batch 1" in out
    assert "two full runs with different noise differ by" in out


def test_a_failed_rollout_gives_an_exit_code(shell, monkeypatch):
    monkeypatch.setattr("toy_task.Toy", partial(Toy, fails={1: 3}))
    code, out, err = shell("-m", "uniform:S=3")
    assert code == 1
    assert "error: 2 rollouts failed" in err
    assert "1 (1 failed)" in out


def test_an_interrupt_keeps_what_is_finished_and_says_so(shell, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("toy_task.Toy", partial(Toy, interrupt=2))
        code, _, err = shell("-m", "uniform:S=3", "--rollouts", 4)
        assert code == 130
        assert "interrupted; what was finished is kept in results.state, the same command goes on" in err
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "results.state").glob("*.json")}
    assert len(kept) == 6  # four open loop, two groups
    assert not (tmp_path / "results.json").exists()
    assert shell("-m", "uniform:S=3", "--rollouts", 4)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "bca"), "error: unknown method 'bca'"),
        (("--rollouts", "0"), "0 is not in the range"),
        (("--ray", "auto", "--workers", "2"), "exclude one another"),
        (("--video", "x.avi"), "a video is a .gif or a .mp4 file"),
        (("-m", "nowhere.json"), "error: no schedule at nowhere.json"),
    ],
)
def test_the_verb_refuses_with_one_line(shell, arguments, message):
    code, out, err = shell(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_the_verb_refuses_unknown_tasks_and_missing_simulators(shell, monkeypatch):
    assert "error: unknown task 'nope'; known tasks are" in shell(task="nope")[2]
    assert "error: the policy does not fit task pusht" in shell(task="pusht")[2]

    def missing(spec):
        raise ImportError("No module named 'gym_toy'")

    monkeypatch.setattr("toy_task.Toy", missing)
    code, _, err = shell()
    assert code == 2
    assert 'pip install "blockcache[toy]"' in err


# ---- the video


def test_the_video_shows_both_policies_side_by_side(shell, tmp_path):
    image = pytest.importorskip("PIL.Image")
    assert shell("-m", "uniform:S=3", "--video", "film.gif")[0] == 0
    film = image.open(tmp_path / "film.gif")
    assert film.n_frames == 10  # the start and nine steps
    assert film.size == (2 * 384, 256 + 18)
    film.seek(9)
    pixels = np.asarray(film.convert("RGB"))
    assert abs(int(pixels[100, 100, 0]) - 225) < 4
    assert abs(int(pixels[100, 500, 0]) - 225) < 4


def test_a_film_that_ends_early_stays_on_its_last_picture(tmp_path):
    image = pytest.importorskip("PIL.Image")
    frames = [np.full((4, 4, 3), value, dtype=np.uint8) for value in (10, 90, 200)]
    write_video(tmp_path / "film.gif", {"short": frames[:1], "long": frames})
    film = image.open(tmp_path / "film.gif")
    film.seek(2)
    pixels = np.asarray(film.convert("RGB"))
    assert abs(int(pixels[200, 100, 0]) - 10) < 4
    assert abs(int(pixels[200, 400, 0]) - 200) < 4


def test_an_mp4_can_be_read_back(tmp_path):
    cv2 = pytest.importorskip("cv2")
    write_video(tmp_path / "film.mp4", {"one": [np.full((40, 40, 3), (200, 0, 0), dtype=np.uint8)] * 5})
    film = cv2.VideoCapture(str(tmp_path / "film.mp4"))
    found, picture = film.read()
    assert found
    assert picture[150, 100, 2] > 150 > 60 > picture[150, 100, 0]  # red, and OpenCV has blue first


def test_the_video_is_of_the_very_rollout_in_the_results(make_policy, results, tmp_path):
    frames = []
    done = ready(make_policy(), tmp_path / "state").play("uniform:S=3", 3, lambda toy: frames.append(toy.seed))
    assert done.score == results.of("uniform:S=3")[3].score
    assert frames == [3] * 13  # the start, and three chunks of four
