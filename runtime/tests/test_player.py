"""The player: every tick has its action or a counted reason, under a clock that the test moves, and beside a real thread."""

import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from blockcache_runtime import ObservationLog, Player, open_export
from blockcache_runtime.errors import EngineError, ObservationError
from clocked_player import RATE, Clock, Ramp, Worker, made, play


def test_actions_are_those_of_their_own_tick_whatever_the_delay():
    for seconds, waiting in ((0.0, 0), (0.03, 2), (0.075, 4)):
        player, clock, _ = made(seconds)
        assert play(player, clock, 40) == [None] * waiting + [float(tick) for tick in range(waiting, 40)]
        assert player.counters["waiting"] == waiting
        assert player.counters["held"] == 0


def test_a_chunk_is_asked_for_with_the_history_of_its_tick():
    actor = Ramp()
    player, clock, _ = made(0.03, actor)
    play(player, clock, 10)
    assert actor.seen == [[0, 0], [3, 4], [7, 8]]
    assert actor.previous[0] is None
    assert actor.previous[1].actions[:, 0].tolist() == list(range(4, 12))
    assert actor.previous[1].delay == 2


def test_the_last_action_is_held_while_a_chunk_is_late_and_no_jump_follows():
    late = iter([0.0] * 3 + [0.02] * 3 + [0.5] + [0.02] * 100)
    player, clock, _ = made(lambda: next(late))
    found = play(player, clock, 80)
    counted = player.counters
    held = [tick for tick in range(1, 80) if found[tick] is not None and found[tick] == found[tick - 1]]
    assert len(held) == counted["held"] > 5
    assert counted["missed"] == 2
    assert found[-1] == 79, "it does not catch up"


def test_an_hour_with_stalls_has_no_tick_without_an_action_or_a_counted_reason():
    rng = random.Random(0)
    player, clock, _ = made(lambda: rng.choice([0.01] * 50 + [0.04] * 10 + [0.3]) if rng.random() < 0.999 else 2.0)
    stalls = {rng.randrange(RATE * 3600): rng.uniform(0.05, 1.0) for _ in range(200)}
    found = play(player, clock, RATE * 3600, stall=lambda tick: stalls.get(tick, 0.0))
    counted = player.counters
    fresh = sum(action == tick for tick, action in enumerate(found))
    assert counted["ticks"] == len(found) == RATE * 3600
    assert found.count(None) == counted["waiting"] <= 120
    assert fresh + counted["held"] + counted["waiting"] == len(found)
    assert counted["late"] == len({tick for tick in stalls if tick < len(found) - 1})
    assert counted["held"] > 100
    assert counted["missed"] > 10
    assert counted["failed"] == 0


def test_the_same_hour_twice_is_the_same():
    def hour():
        rng = random.Random(3)
        player, clock, _ = made(lambda: rng.uniform(0.0, 0.1))
        return play(player, clock, 5000), player.counters

    assert hour() == hour()


def test_the_first_slow_inference_does_not_count_as_the_usual_delay():
    took = iter([0.0] * 3 + [0.5] + [0.03] * 100)
    actor = Ramp()
    player, clock, _ = made(lambda: next(took), actor)
    play(player, clock, 60)
    assert actor.previous[-1].delay == 2


def test_a_chunk_that_fails_is_counted_and_asked_for_again():
    actor = Ramp()
    player, clock, _ = made(0.01, actor)
    play(player, clock, 8)
    actor.failing = True
    found = play(player, clock, 20, first=8)
    assert found[-1] == found[-2]
    assert player.counters["failed"] >= 8
    assert str(player.error) == "no light"
    actor.failing = False
    assert play(player, clock, 10, first=28)[-1] == 37


def test_who_changes_an_action_changes_no_chunk():
    def executed(factor):
        late = iter([0.0] * 3 + [0.02] * 3 + [0.5] + [0.02] * 100)
        actor, found = Ramp(), []
        player, clock, _ = made(lambda: next(late), actor)
        for tick in range(60):
            player.observe(np.array([tick], np.float32))
            if (action := player.next_action()) is not None:
                found.append(float(action[0]))
                action *= factor
            clock.now += 1 / RATE
        assert player.counters["held"] > 5
        return found, [told.actions.tolist() for told in actor.previous if told is not None]

    assert executed(2) == executed(1)


def test_observations_out_of_order_or_twice_are_counted_and_left_out():
    actor = Ramp()
    player, _clock, _ = made(0.0, actor)
    for tick, at in ((0, 0.0), (1, 0.1), (9, 0.1), (8, 0.05), (2, 0.2)):
        player.observe(np.array([tick], np.float32), at=at)
    player.next_action()
    assert actor.seen == [[1, 2]]
    assert player.counters["ignored"] == 2


def test_stamps_whose_clock_is_set_back_do_not_stop_the_player():
    actor = Ramp()
    player, _clock, _ = made(0.0, actor)
    for tick, at in ((0, 1000.0), (1, 1000.1), (2, 5.0), (3, 5.1), (4, 4.5)):
        player.observe(np.array([tick], np.float32), at=at)
    player.next_action()
    assert actor.seen == [[2, 3]]
    assert (player.counters["ignored"], player.counters["clock_back"]) == (1, 1)


def test_stamps_that_are_no_times_and_those_of_refused_observations_change_nothing():
    actor = Ramp()
    player, _clock, _ = made(0.0, actor)
    player.observe(np.array([1.0]), at=1.0)
    for at in (float("inf"), float("nan"), -float("inf")):
        with pytest.raises(ObservationError, match="at a finite time"):
            player.observe(np.array([2.0]), at=at)
    with pytest.raises(ObservationError):
        player.observe(np.array([np.nan]), at=9.0)
    player.observe(np.array([3.0]), at=1.5)
    player.next_action()
    assert actor.seen == [[1, 3]]
    assert player.counters["ignored"] == 0


def test_an_observation_that_is_refused_changes_nothing():
    actor = Ramp()
    player, _clock, _ = made(0.0, actor)
    player.observe(np.array([1.0]))
    for odd in (np.array([np.nan]), np.zeros(2)):
        with pytest.raises(ObservationError):
            player.observe(odd)
    player.next_action()
    assert actor.seen == [[1, 1]]


def test_chunks_without_a_new_observation_are_counted():
    player, clock, _ = made(0.0)
    play(player, clock, 8)
    assert player.counters["unseen"] == 0
    for _ in range(12):  # the sensor is silent: the second and the third chunk see what the first has seen
        player.next_action()
        clock.now += 1 / RATE
    assert player.counters["unseen"] == 2
    play(player, clock, 8, first=20)
    assert player.counters["unseen"] == 2


def test_a_clock_set_back_is_survived():
    player, clock, _ = made(0.0)
    play(player, clock, 10)
    clock.now -= 500
    assert play(player, clock, 10, first=10) == list(range(10, 20))
    assert player.counters["late"] == 0


def test_before_anything_was_seen_there_is_no_action():
    player, _clock, worker = made(0.0)
    assert player.next_action() is None
    assert worker.submitted == ["warm_up"] * 3


def test_another_episode_begins_with_nothing():
    actor = Ramp()
    player, clock, _ = made(0.03, actor)
    play(player, clock, 10)
    player.reset()
    assert set(player.counters.values()) == {0}
    assert play(player, clock, 6, first=500) == [None, None, 502, 503, 504, 505]
    assert actor.seen[-2:] == [[500, 500], [503, 504]]


def test_frames_are_encoded_by_the_worker_while_it_has_nothing_to_do():
    actor = Ramp()
    actor.cameras = ("image",)
    player, clock, worker = made(0.01, actor)
    play(player, clock, 12)
    assert worker.submitted[3:] == ["_chunk", "encode_frames"] * 3
    assert actor.seen == [[0, 0], "frames", [3, 4], "frames", [7, 8], "frames"]


def test_frames_that_cannot_be_encoded_ahead_are_counted_once_and_left_to_the_chunks():
    class Blind(Ramp):
        cameras = ("image",)

        def encode_frames(self, observed):
            raise ObservationError("no file")

    player, clock, worker = made(0.01, Blind())
    assert play(player, clock, 12)[-1] == 11
    assert worker.submitted.count("encode_frames") == 1
    assert player.counters["failed"] == 1
    assert str(player.error) == "no file"
    player.reset()
    play(player, clock, 12)
    assert worker.submitted.count("encode_frames") == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replan": 0}, "replan=0"),
        ({"rate_hz": 0}, "rate_hz"),
        ({"rate_hz": float("nan")}, "rate_hz"),
        ({"replan": 8, "seconds": 0.095}, "needs a horizon of 13; replan after 7 actions at most"),
        ({"seconds": 0.19}, "needs a horizon of 20"),
    ],
)
def test_what_cannot_be_held_is_refused(settings, said):
    seconds, rate = settings.pop("seconds", 0.0), settings.pop("rate_hz", RATE)
    clock = Clock()
    worker = Worker(clock, lambda: seconds)
    with pytest.raises(EngineError, match=said):
        Player(Ramp(), rate, **{"replan": 4, **settings}, clock=clock, worker=worker)


def test_a_player_that_was_stopped_says_so():
    player, clock, worker = made(0.0)
    with player:
        play(player, clock, 3)
    assert not worker.stopped, "it is the caller's"
    with pytest.raises(EngineError, match="was stopped"):
        player.next_action()


def test_a_chunk_that_is_under_way_is_logged_in_the_episode_that_it_was_asked_in(tmp_path):
    class Slow(Ramp):
        def chunk(self, observed, previous):
            begun.set()
            assert go_on.wait(20)
            return super().chunk(observed, previous)

    begun, go_on = threading.Event(), threading.Event()
    with ObservationLog(tmp_path / "log") as log:
        first = log.begin_episode()
        with Player(Slow(), RATE, 4, log=log) as player:
            player.observe(np.zeros(1))
            player.next_action()
            assert begun.wait(20)
            player.reset()
            go_on.set()
        assert log._rows[0]["moments"].tolist() == [[first, 0]]


def test_an_error_is_of_its_own_episode():
    actor = Ramp()
    player, clock, _ = made(0.01, actor)
    actor.failing = True
    play(player, clock, 4)
    assert player.error is not None
    player.reset()
    assert player.error is None


def test_a_loop_that_is_faster_than_promised_is_told_so():
    took = iter([0.0] * 3 + [0.3] * 10)
    player, clock, _ = made(lambda: next(took))
    found = []
    for tick in range(200):
        player.observe(np.array([tick], np.float32))
        found.append(player.next_action())
        clock.now += 0.1 / RATE
    assert found[-1] is None
    assert "called more often than 50 times a second" in str(player.error)


def test_what_a_log_refuses_does_not_stop_the_robot(tmp_path):
    with ObservationLog(tmp_path / "log") as log:
        log.add(np.zeros((1, 2, 7)))
        player, clock, _ = made(0.0, log=log)
        assert play(player, clock, 9)[-1] == 8
    assert player.counters["failed"] == 0
    assert "of one form" in str(player.error)
    assert log.dropped == 3


def test_what_was_asked_is_logged(tmp_path):
    with ObservationLog(tmp_path / "log") as log:
        player, clock, _ = made(0.0, log=log)
        play(player, clock, 9)
    assert log.added == 3


class Sleepy(Ramp):
    """Takes real time."""

    def chunk(self, observed, previous):
        time.sleep(0.03)
        return super().chunk(observed, previous)


def test_beside_a_real_thread_no_call_waits_for_a_chunk():
    took, threads = [], set()

    class Watched(Sleepy):
        def chunk(self, observed, previous):
            threads.add(threading.current_thread().name)
            return super().chunk(observed, previous)

    with Player(Watched(), RATE, 4) as player:
        for tick in range(60):
            started = time.perf_counter()
            player.observe(np.array([tick], np.float32))
            player.next_action()
            took.append(time.perf_counter() - started)
            time.sleep(1 / RATE)
    assert sorted(took)[30] < 0.005
    assert len(threads) == 1
    assert threading.current_thread().name not in threads
    assert player.counters["chunks"] > 5
    assert not [one for one in threading.enumerate() if one.name.startswith("blockcache-player")]


def test_an_export_is_played(robot_file):
    policy = open_export(robot_file, threads=1)
    with Player(policy, rate_hz=20, replan=2, seed=0) as player:
        found = []
        for tick in range(12):
            player.observe(np.full(5, 0.1 * tick))
            found.append(player.next_action())
            time.sleep(0.02)
    assert found[-1].shape == (policy.action_dim,)
    assert all(np.isfinite(one).all() for one in found if one is not None)


def test_an_overlap_that_an_export_cannot_follow_is_refused(robot_file):
    with pytest.raises(EngineError, match="export it with --rtc, or leave overlap out"):
        Player(open_export(robot_file, threads=1), rate_hz=1, replan=2, overlap=3)


def test_a_first_observation_of_another_shape_is_refused_and_poisons_nothing(robot_file):
    with Player(open_export(robot_file, threads=1), rate_hz=1, replan=2) as player:
        for odd in (np.zeros(4), np.zeros((2, 5)), {"obs": np.zeros(4)}, {"other": np.zeros(5)}, [[1], [2, 3]]):
            with pytest.raises(ObservationError, match=r"has shape .*expected \(5,\)|no key 'obs'|not an array"):
                player.observe(odd)
        player.observe(np.zeros(5))
        assert player.counters["ignored"] == 0


FORGOTTEN = """
import sys, numpy as np
from blockcache_runtime import Player, open_export
player = Player(open_export(sys.argv[1], threads=1), 20, 2)
player.observe(np.zeros(5))
player.next_action()
"""


def test_a_program_that_forgets_to_stop_the_player_ends_all_the_same(robot_file):
    """A daemon thread inside ONNX Runtime would abort the process."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", FORGOTTEN, robot_file], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def robot_file(policy, tmp_path):
    import blockcache as bc

    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    return str(tmp_path / "policy.onnx")
