"""The jobs of an evaluation: the same records whoever runs them and however often they are interrupted."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from blockcache.compare.jobs import EvaluationError, local_workers, one_by_one, ray_cluster, run_jobs
from blockcache.compare.paired import one_thread
from blockcache.compare.store import Store
from blockcache.errors import FileError, TaskError
from blockcache.tasks import TaskSpec
from repository import HELPERS
from toy_evaluation import ready
from toy_task import SPEC, Toy

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def evaluate_here(directory, slow):
    """What the tests start in a process of its own, to kill it."""
    from conftest import tiny_policy

    run = ready(tiny_policy(), Path(directory) / "results.state", partial(Toy, slow=slow))
    run.run(progress=False).save(Path(directory) / "results.json")


# ---- the same, whoever runs it


def test_two_workers_give_the_same_file(make_policy, reference, tmp_path):
    run = ready(make_policy(), tmp_path / "state")
    run.run(local_workers(2), progress=False).save(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_bytes() == reference


@pytest.fixture
def found_by_ray(monkeypatch):
    """Ray's workers have to find this file and the toy."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HELPERS), str(Path(__file__).parent))))


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
    paths = [str(HELPERS), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {paths!r}; import test_evaluation_jobs as here; "
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
