"""A log of observations: what is kept, how much of it, and that `check` and `tune` read it."""

import threading

import numpy as np
import pytest

from blockcache.errors import FileError
from blockcache.observations import RECORDING, fit_observations, load_observations, split
from blockcache.results.check import Check
from blockcache_runtime import History, ObservationLog, observation_log
from blockcache_runtime.errors import ObservationError
from blockcache_runtime.observation_log import log_files


def batch(value, camera=False):
    found = {"state": np.full((1, 2, 3), value, np.float32)}
    return found | ({"image": np.full((1, 2, 3, 4, 5), value % 256, np.uint8)} if camera else {})


def test_what_was_asked_is_read_again_with_its_moments(tmp_path):
    history, memory = History(2), np.zeros(3)
    with ObservationLog(tmp_path / "log") as log:
        for episode in range(3):
            log.begin_episode()
            history.reset()
            for place in range(4):
                memory[:] = 10 * episode + place  # a driver that reuses its memory
                log.add(history.push(memory), actions=np.full((4, 2), place))
    found = load_observations(tmp_path / "log")
    assert found["obs"].shape == (12, 2, 3)
    assert found["answered_actions"].shape == (12, 4, 2)
    by_moment = {
        tuple(moment): (obs[-1, 0], action[0, 0])
        for moment, obs, action in zip(found["moments"].tolist(), found["obs"], found["answered_actions"], strict=True)
    }
    assert by_moment == {(e, p): (10 * e + p, p) for e in range(3) for p in range(4)}
    assert np.array_equal(fit_observations(found, {"obs": (2, 3)}, (), "log"), found["obs"])


def test_the_first_few_stand_for_the_whole_log(tmp_path):
    with ObservationLog(tmp_path / "log") as log:
        for value in range(100):
            log.add(batch(value))
    found = load_observations(tmp_path / "log")["state"][:10, 0, 0]
    assert found.min() < 40
    assert found.max() > 60
    assert np.array_equal(load_observations(tmp_path / "log")["state"][:10, 0, 0], found)


def test_files_are_written_as_it_goes_and_the_oldest_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(observation_log, "FILE_ROWS", 10)
    rng = np.random.default_rng(0)
    with ObservationLog(tmp_path / "log", most_bytes=60_000) as log:
        for _ in range(200):
            log.add({"obs": rng.standard_normal((1, 2, 100))})
            while log._waiting and len(log._rows) == 0 and not log._waiting[-1].done():
                pass  # the disk keeps up
    files = log_files(tmp_path / "log")
    assert 1 <= sum(file.stat().st_size for file in files) <= 60_000
    assert files[-1].name == "observations-000020.npz"
    assert len(files) < 20
    assert log.added == 200
    assert log.dropped == 0


def test_a_disk_that_does_not_keep_up_costs_observations_and_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(observation_log, "FILE_ROWS", 2)
    go_on = threading.Event()
    written = observation_log.write_arrays
    monkeypatch.setattr(observation_log, "write_arrays", lambda *a, **k: (go_on.wait(20), written(*a, **k)))
    log = ObservationLog(tmp_path / "log")
    for value in range(50):
        log.add(batch(value))
    assert log.added == 10
    assert log.dropped == 40
    go_on.set()
    until_written(log)
    for value in range(4):  # and once it keeps up again, the log goes on
        log.add(batch(value))
        until_written(log)
    log.close()
    assert (log.added, log.dropped) == (14, 40)
    assert len(load_observations(tmp_path / "log")["state"]) == 14


def until_written(log):
    for one in log._waiting:
        one.result(20)


def test_what_waits_for_the_disk_is_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(observation_log, "FILE_BYTES", 3 * batch(0)["state"].nbytes)
    go_on = threading.Event()
    monkeypatch.setattr(observation_log, "write_arrays", lambda *a, **k: go_on.wait(20))
    with ObservationLog(tmp_path / "log") as log:
        for value in range(50):
            log.add(batch(value))
        assert (log.added, log.dropped) == (15, 35)
        go_on.set()


def test_episodes_that_are_over_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(observation_log, "_MOST_EPISODES", 3)
    with ObservationLog(tmp_path / "log") as log:
        for value in range(20):
            log.begin_episode()
            log.add(batch(value))
            log.add(batch(value))
            log.add(batch(value), episode=0)  # goes on all the while
        assert len(log._places) == 3
    moments = load_observations(tmp_path / "log")["moments"]
    assert sorted(place for episode, place in moments.tolist() if episode == 0) == [*range(22)]


def test_a_log_goes_on_after_a_restart(tmp_path):
    for value in range(3):
        with ObservationLog(tmp_path / "log") as log:
            log.begin_episode()
            log.add(batch(value, camera=True))
    found = load_observations(tmp_path / "log")
    assert sorted(found["moments"].tolist()) == [[0, 0], [1, 0], [2, 0]]
    assert found["image"].dtype == np.uint8
    assert len(log_files(tmp_path / "log")) == 3


def test_a_full_disk_is_counted_and_does_not_stop_the_robot(tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise FileError("no space")

    monkeypatch.setattr(observation_log, "write_arrays", full)
    with ObservationLog(tmp_path / "log") as log:
        log.add(batch(1))
    assert log.dropped == 1
    assert "1 observations are not recorded: no space" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros((2, 2, 3)), "batches of one"),
        (np.zeros(3), "batches of one"),
        ({}, "batches of one"),
        ({"obs": np.array([["a"]])}, "batches of one"),
        ({"moments": np.zeros((1, 2))}, "that name is taken"),
    ],
)
def test_what_is_no_observation_is_refused(tmp_path, given, said):
    with ObservationLog(tmp_path / "log") as log, pytest.raises(ObservationError, match=said):
        log.add(given)


def test_observations_of_another_form_are_refused(tmp_path):
    with ObservationLog(tmp_path / "log") as log:
        log.add(batch(1))
        with pytest.raises(ObservationError, match="of one form"):
            log.add(batch(1, camera=True))
        assert log.dropped == 1
    with ObservationLog(tmp_path / "bytes") as log:
        log.add(batch(1, camera=True))
        with pytest.raises(ObservationError, match=r"of one form.*'float'.*'uint8'"):
            log.add(batch(1) | {"image": np.zeros((1, 2, 3, 4, 5), np.float32)})
        log.add(
            {name: value.astype(np.float64) if name == "state" else value for name, value in batch(1, True).items()}
        )
    with ObservationLog(tmp_path / "log") as log:
        log.add({"state": np.zeros((1, 2, 4))})
    with pytest.raises(FileError, match="different shapes"):
        load_observations(tmp_path / "log")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="expected files of an ObservationLog"):
        load_observations(tmp_path / "empty")


def test_errors_about_missing_observations_name_the_recorder():
    assert "ObservationLog" in RECORDING
    with pytest.raises(ObservationError, match="ObservationLog"):
        split(np.zeros((1, 2, 3)), {"tuning": 5})


def test_calibrate_and_check_read_a_log(tmp_path, blockcache, policy_directory, exports_stay_here):
    """From what a robot recorded to a verdict."""
    rng, history, log = np.random.default_rng(0), History(2), tmp_path / "log"
    with ObservationLog(log) as kept:
        for _episode in range(5):
            kept.begin_episode()
            history.reset()
            for _place in range(8):
                kept.add(history.push(rng.standard_normal(5)), actions=np.zeros((4, 3)))
    given = (policy_directory, "--observations", log)
    assert "from 1 generations" in blockcache("calibrate", *given, "--generations", 1, "-o", tmp_path / "recording")
    few = ("--count", 8, "--samples", 4, "--generations", 2, "--engine", "loop")
    blockcache("check", policy_directory, "ddpm-3", *given[1:], *few, "-o", tmp_path / "check.json")
    assert Check.load(tmp_path / "check.json").setting["observations"] == 8
