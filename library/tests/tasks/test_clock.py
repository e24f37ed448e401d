"""Rollouts on the clock, on a toy simulator whose executed actions tell which chunk they come from."""

import numpy as np
import pytest

from blockcache.errors import TaskError
from blockcache.tasks import Clock, TaskSpec, clocked_rollout
from blockcache_runtime.errors import EngineError
from listener import Listener

SPEC = TaskSpec("toy", obs_dim=2, action_dim=1, max_steps=20, success="never", extra="toy")


class World:
    """Counts its steps; the observation is (seed, steps). It is over after `ends` steps."""

    def __init__(self, ends=100):
        self.spec, self.ends, self.closed = SPEC, ends, False

    def reset(self, seed):
        self.seed, self.steps, self.done_actions = seed, 0, []
        return self.observe()

    def observe(self):
        return np.array([self.seed, self.steps], dtype=np.float32)

    def step(self, action):
        self.steps += 1
        self.done_actions.append(float(action[0]))

    @property
    def score(self):
        return self.steps / SPEC.max_steps

    @property
    def success(self):
        return False

    @property
    def done(self):
        return self.steps >= self.ends

    def render(self):
        return np.zeros((1, 1, 3), dtype=np.uint8)

    def close(self):
        self.closed = True


class Policy:
    """Action i of a chunk is 100 times the steps seen, plus i; and what it was asked is kept."""

    def __init__(self, actions=9):
        self.actions, self.asked = actions, []

    def __call__(self, obs, places, chunks, previous):
        self.asked.append((obs.copy(), list(places), list(chunks), previous))
        return (100 * obs[:, -1:, 1:] + np.arange(self.actions)[:, None]).astype(float)


def run(policy, clock, seeds=(5,), worlds=None, **settings):
    made = []

    def make():
        made.append(World(*([] if worlds is None else [worlds[len(made)]])))
        return made[-1]

    try:
        return clocked_rollout(make, policy, seeds, clock, n_obs_steps=2, **settings)
    finally:
        assert all(world.closed for world in made)


def executed(record):
    return record.actions[:, 0].tolist()


def test_without_a_delay_it_is_the_rollout_of_always():
    policy = Policy()
    (record,) = run(policy, Clock(10, 4, (0.0,)))
    assert executed(record) == [100 * (tick - tick % 4) + tick % 4 for tick in range(20)]
    assert (record.first_action, record.action_hz, record.steps, record.score) == (0.0, pytest.approx(10), 20, 1.0)
    assert record.seams == (4, 8, 12, 16)
    assert (record.counters.stale, record.counters.held, record.counters.missed) == (0, 0, 0)
    assert [asked[0][0, :, 1].tolist() for asked in policy.asked] == [[0, 0], [3, 4], [7, 8], [11, 12], [15, 16]]
    assert [asked[2] for asked in policy.asked] == [[0], [1], [2], [3], [4]]


def test_a_chunk_is_drawn_from_the_observation_at_the_request_and_executed_at_its_own_time():
    """Two ticks of delay: the first two ticks nothing moves, and the world's steps lag behind the ticks by two."""
    (record,) = run(Policy(), Clock(10, 4, (0.15,)))
    # asked at ticks 0, 4, 8, ..., when the world had made 0, 2, 6, ... steps; each is executed from its third action on
    assert executed(record)[:10] == [2, 3, 4, 5, 202, 203, 204, 205, 602, 603]
    assert (record.steps, record.counters.waiting, record.first_action) == (18, 2, pytest.approx(0.2))
    assert record.action_hz == pytest.approx(10 * 18 / 20)
    assert record.counters.skipped == 2 * record.counters.chunks
    assert record.seams[:2] == (4, 8)


def test_a_watcher_hears_of_its_own_episode():
    listener = Listener()
    run(Policy(), Clock(10, 4, (0.15,)), seeds=(5, 6), watchers={6: listener})
    assert listener.seen[:4] == [(0, [6, 0]), (1, [6, 0]), (2, [6, 0]), (3, [6, 1])]
    assert [plan[:2] for plan in listener.plans] == [(0, 2), (4, 6), (8, 10), (12, 14), (16, 18)]
    assert listener.plans[1][2:] == ([200.0 + place for place in range(9)], {"latency_ms": 150.0})
    assert listener.done[:4] == [(0, None, False), (1, None, False), (2, 2.0, False), (3, 3.0, False)]


def test_stop_and_think_holds_the_last_action():
    (record,) = run(Policy(), Clock(10, 3, (0.2,), stop=True))
    assert executed(record)[:8] == [0, 1, 2, 2, 2, 300, 301, 302]
    assert (record.counters.held, record.counters.missed, record.counters.chunks) == (6, 3, 4)
    assert record.action_hz == pytest.approx(10 * (20 - 2 - 6) / 20)


def test_a_chunk_is_told_what_will_have_been_executed_when_it_arrives():
    policy = Policy()
    run(policy, Clock(10, 4, (0.2,), rtc=True, overlap=3))
    first, second, third = (asked[3] for asked in policy.asked[:3])
    assert first.delay.tolist() == [0]  # nothing was before it
    assert second.actions[0, :, 0].tolist() == [4, 5, 6, 7, 8]
    assert (second.delay.tolist(), second.overlap.tolist()) == ([2], [3])
    assert third.actions[0, :, 0].tolist() == [204, 205, 206, 207, 208]
    untold = Policy()
    run(untold, Clock(10, 4, (0.2,)))
    assert [asked[3] for asked in untold.asked] == [None] * 5


def test_recorded_latencies_are_drawn_alike_for_every_method_and_each_episode_has_its_own():
    clock, policy = Clock(10, 4, (0.0, 0.1, 0.5), rtc=True), Policy()
    one, other = run(policy, clock, seeds=(5, 6)), run(Policy(), clock, seeds=(5, 6))
    assert [executed(record) for record in one] == [executed(record) for record in other]
    assert executed(one[0]) != executed(one[1])
    (alone,) = run(Policy(), clock, seeds=(6,))
    assert executed(alone) == executed(one[1])
    assert {clock.latency(5, chunk) for chunk in range(50)} == {0.0, 0.1, 0.5}
    together = [asked for asked in policy.asked if len(asked[1]) == 2]
    assert together, "or two that ask at one tick are not one batch"
    assert len(policy.asked) > len(together)


def test_live_latencies_are_measured_call_by_call(monkeypatch):
    clock = iter(np.arange(0, 1000, 0.15))  # each call takes 0.15 s
    monkeypatch.setattr("blockcache.tasks.clock.time.perf_counter", lambda: float(next(clock)))
    policy = Policy()
    records = run(policy, Clock(10, 4, None), seeds=(5, 6))
    assert all(len(asked[1]) == 1 for asked in policy.asked)
    assert [record.first_action for record in records] == [pytest.approx(0.2)] * 2


def test_an_episode_that_is_over_is_left_alone():
    policy = Policy()
    short, long = run(policy, Clock(10, 4, (0.1,)), seeds=(5, 6), worlds=[3, 100])
    assert (short.steps, long.steps) == (3, 19)
    assert [asked[1] for asked in policy.asked[:3]] == [[0, 1], [1], [1]]
    assert short.counters.ticks == 4


def test_a_latency_longer_than_the_episode_leaves_it_without_an_action():
    (record,) = run(Policy(), Clock(10, 8, (60.0,), stop=True))
    assert (record.steps, record.score, record.success, record.error) == (0, 0.0, False, None)
    assert (record.first_action, record.action_hz, record.counters.waiting) == (None, 0.0, 20)


def test_an_overlap_too_short_for_the_delay_is_refused_with_the_horizon_that_would_do():
    with pytest.raises(EngineError, match=r"9 actions, .* needs a horizon of 12; replan after 5 actions at most"):
        run(Policy(), Clock(10, 8, (0.4,)))
    with pytest.raises(TaskError, match="a chunk has 9 actions, so that 10 of each cannot be executed"):
        run(Policy(), Clock(10, 10, (0.4,), stop=True))
    (record,) = run(Policy(), Clock(10, 4, (0.1, 0.7)))  # of recorded times the shortest must do; others are held
    assert record.counters.missed > 0
    assert record.counters.held > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rate": 0}, "rate above 0, got 0"),
        ({"rate": float("nan")}, "rate above 0, got nan"),
        ({"replan": 0}, "replan of 1 or more"),
        ({"seconds": ()}, "one latency at least"),
        ({"seconds": (0.1, -0.1)}, "0 or more, got -0.1"),
        ({"seconds": (float("inf"),)}, "got inf"),
        ({"stop": True, "rtc": True}, "stops to think has nothing to tell"),
        ({"overlap": -1}, "overlap of 0 or more"),
    ],
)
def test_a_clock_that_no_time_passes_on_is_refused(settings, said):
    with pytest.raises(TaskError, match=said):
        Clock(**{"rate": 10, "replan": 4, "seconds": (0.1,), **settings})


@pytest.mark.parametrize(("seconds", "ticks"), [(0, 0), (0.001, 1), (0.1, 1), (0.1001, 2), (0.3, 3), (0.4, 4)])
def test_what_arrives_between_two_ticks_is_there_at_the_second(seconds, ticks):
    assert Clock(10, 4, (seconds,)).ticks(seconds) == ticks


def test_chunks_of_another_shape_are_refused():
    with pytest.raises(TaskError, match=r"have shape \(1, 9\), the task needs \(1, actions, 1\)"):
        run(lambda *asked: np.zeros((1, 9)), Clock(10, 4, (0.0,)))


def test_every_tick_can_be_watched():
    seen = []
    run(Policy(), Clock(10, 4, (0.2,)), on_step=lambda tasks: seen.append(tasks[0].steps))
    assert seen == [0, 0, 0, *range(1, 19)]


def test_a_chunk_may_run_out_where_that_is_asked_for():
    """A delay of 6 ticks: each chunk's last three actions, and the last one again until the next arrives."""
    (record,) = run(Policy(), Clock(10, 4, (0.6,), hold=True))
    assert executed(record)[:9] == [6, 7, 8, 8, 8, 8, 6, 7, 8]
    assert (record.counters.held, record.counters.missed) == (6, 2)
    (record,) = run(Policy(), Clock(10, 4, (0.9,), hold=True))  # all nine actions are late
    assert (record.steps, record.first_action) == (0, None)
    assert Clock(10, 4, (0.6,), hold=True).describe() != Clock(10, 4, (0.6,)).describe()
