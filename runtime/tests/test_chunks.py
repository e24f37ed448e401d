"""Chunks on a timeline of ticks: whose action is due, what is skipped, held, stale and told."""

import numpy as np
import pytest

from blockcache_runtime.chunks import (
    EXECUTION_HORIZON,
    LATENCY,
    PREVIOUS_CHUNK,
    ChunkTimeline,
    Counters,
    Previous,
    check_horizon,
    prefix_weights,
)
from blockcache_runtime.errors import EngineError, ObservationError


def chunk_of(tick, length=9):
    """Action i of the chunk of tick r is 100 r + i: what is executed tells where it comes from."""
    return np.array([[100.0 * tick + index] for index in range(length)])


def play(timeline, delays, ticks, length=9):
    """Executed actions and what each chunk was told; chunk number n takes delays[n] ticks, the last one for ever."""
    executed, told, arrivals = [], [], {}
    for tick in range(ticks):
        if tick in arrivals:
            timeline.arrive(tick, chunk_of(arrivals.pop(tick), length))
        if timeline.wants_chunk(tick):
            told.append(timeline.request(tick))
            delay = delays[min(len(told) - 1, len(delays) - 1)]
            if delay == 0:
                timeline.arrive(tick, chunk_of(tick, length))
            else:
                arrivals[tick + delay] = tick
        due = timeline.act(tick)
        executed.append(None if due.action is None else due.action[0] if not due.held else -due.action[0])
    return executed, told


def test_without_a_delay_each_chunk_gives_replan_actions():
    timeline = ChunkTimeline(4)
    executed, told = play(timeline, [0], 12)
    assert executed == [0, 1, 2, 3, 400, 401, 402, 403, 800, 801, 802, 803]
    assert told[0] is None
    assert [item.delay for item in told[1:]] == [0, 0]
    assert timeline.counters == Counters(ticks=12, chunks=3, seams=2)


def test_a_chunk_is_kept_as_it_arrived():
    timeline, chunk = ChunkTimeline(4), chunk_of(0)
    timeline.request(0)
    timeline.arrive(0, chunk)
    chunk[:] = -1
    assert timeline.act(0).action == 0


def test_the_old_chunk_goes_on_until_the_new_one_arrives_and_what_is_late_is_skipped():
    timeline = ChunkTimeline(4)
    executed, told = play(timeline, [2], 12)
    assert executed == [None, None, 2, 3, 4, 5, 402, 403, 404, 405, 802, 803]
    assert [item.actions[:, 0].tolist() for item in told[1:]] == [[4, 5, 6, 7, 8], [404, 405, 406, 407, 408]]
    assert [item.delay for item in told[1:]] == [2, 2]
    # three requests are under way for two ticks each; at the first there is nothing that could be stale
    assert timeline.counters == Counters(ticks=12, waiting=2, stale=4, chunks=3, skipped=6, seams=2)


def test_a_delay_as_long_as_the_period_leaves_committed_actions_only():
    executed, _ = play(ChunkTimeline(4), [4], 16)
    assert executed[4:] == [4, 5, 6, 7, 404, 405, 406, 407, 804, 805, 806, 807]


def test_stop_and_think_holds_and_then_begins_with_the_first_action():
    timeline = ChunkTimeline(3, stop=True)
    executed, told = play(timeline, [2], 13)
    assert executed == [None, None, 0, 1, 2, -2, -2, 500, 501, 502, -502, -502, 1000]
    assert told == [None, None, None]
    assert timeline.counters == Counters(ticks=13, waiting=2, held=4, stale=4, chunks=3, missed=2, seams=2)


def test_a_chunk_that_is_too_late_is_waited_for_and_counted():
    timeline = ChunkTimeline(4)
    executed, _ = play(timeline, [0, 7, 0], 14)
    assert executed[:11] == [0, 1, 2, 3, 4, 5, 6, 7, 8, -8, -8]
    assert executed[11:] == [1100, 1101, 1102]  # at tick 11 the late chunk arrives, and the next one is due at once
    assert (timeline.counters.missed, timeline.counters.held, timeline.counters.skipped) == (1, 2, 7)


def test_a_chunk_of_which_everything_is_late_changes_nothing_but_the_counters():
    timeline = ChunkTimeline(2)
    executed, _ = play(timeline, [0, 5], 12, length=4)
    assert executed == [0, 1, 2, 3, *[-3] * 8]
    assert (timeline.counters.skipped, timeline.counters.missed, timeline.counters.held) == (4, 1, 8)


def test_the_delay_is_the_longest_of_the_last_few_and_the_first_one_counts_least():
    timeline = ChunkTimeline(4)
    assert timeline.delay == 0
    _, told = play(timeline, [6, 1, 2, 1, 0], 26, length=20)
    assert [item.delay for item in told[1:5]] == [4, 1, 2, 2]  # of the first, slow one replan at most
    assert timeline.delay == 2
    for tick in range(100, 160, 2):
        timeline.request(tick)
        timeline.arrive(tick + 1, chunk_of(tick))
    assert timeline.delay == 1
    assert ChunkTimeline(4, delay=3).delay == 3


def test_a_new_episode_forgets_the_chunk_and_keeps_the_delays():
    timeline = ChunkTimeline(4)
    play(timeline, [2], 12)
    timeline.reset()
    assert timeline.counters == Counters()
    assert timeline.delay == 2
    assert timeline.wants_chunk(0)
    assert timeline.act(0).action is None


def test_one_chunk_is_asked_for_at_a_time():
    timeline = ChunkTimeline(1)
    with pytest.raises(EngineError, match="nobody asked for"):
        timeline.arrive(0, chunk_of(0))
    timeline.request(0)
    assert not timeline.wants_chunk(1)
    with pytest.raises(EngineError, match="tick 0 has not arrived"):
        timeline.request(1)
    timeline.forget_request()
    assert timeline.wants_chunk(1)
    with pytest.raises(EngineError, match="got replan=0"):
        ChunkTimeline(0)


def weights(previous, batch, count=5):
    told = previous.inputs(batch, count, 1)
    return prefix_weights(told[LATENCY], told[EXECUTION_HORIZON], count)


@pytest.mark.parametrize(
    ("delay", "overlap", "expected"),
    [
        (0, 0, [0, 0, 0, 0, 0]),
        (2, 0, [1, 1, 0, 0, 0]),
        (2, 2, [1, 1, 0, 0, 0]),
        (1, 4, [1, 0.75, 0.5, 0.25, 0]),
        (0, 4, [0.8, 0.6, 0.4, 0.2, 0]),
        (9, 9, [1, 1, 1, 0, 0]),  # of three actions no more can be kept
    ],
)
def test_weights_are_one_for_what_is_committed_and_fall_over_the_overlap(delay, overlap, expected):
    found = weights(Previous(np.zeros((3, 1)) if delay == 9 else np.zeros((5, 1)), delay, overlap), 1)[0]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_each_of_a_batch_has_its_own_delay():
    found = weights(Previous(np.zeros((2, 4, 1)), np.array([0, 3]), 0), 2)
    assert found.tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert prefix_weights(np.array([1.0, 2.0]), np.array([1.0, 2.0]), 2).tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(("replan", "delay"), [(4, 0), (9, 0), (4, 4), (5, 4), (8, 1)])
def test_a_horizon_that_lasts_until_the_next_chunk_is_taken(replan, delay):
    check_horizon(9, replan, delay)
    timeline = ChunkTimeline(replan)
    play(timeline, [delay], 60)
    assert timeline.counters.held == 0


@pytest.mark.parametrize(
    ("replan", "delay", "said"),
    [
        (8, 4, "needs a horizon of 12; replan after 5 actions at most, or make"),
        (4, 5, "needs a horizon of 10; make the policy faster"),
        (10, 0, "needs a horizon of 10; replan after 9 actions at most"),
    ],
)
def test_an_overlap_too_short_for_the_delay_is_refused_with_the_horizon_that_would_do(replan, delay, said):
    with pytest.raises(EngineError, match=said):
        check_horizon(9, replan, delay)
    timeline = ChunkTimeline(replan)
    play(timeline, [delay], 60)
    assert timeline.counters.held > 0 or replan > 9


def test_what_is_known_of_the_chunk_before_fills_the_new_one():
    told = Previous(np.array([[1.0, 2], [3, 4]]), 1).inputs(2, 4, 2)
    assert told[PREVIOUS_CHUNK].tolist() == [[[1, 2], [3, 4], [3, 4], [3, 4]]] * 2
    assert told[LATENCY].tolist() == told[EXECUTION_HORIZON].tolist() == [1, 1]
    assert {array.dtype for array in told.values()} == {np.dtype(np.float32)}
    assert Previous(np.zeros((9, 1)), 9, 9).inputs(1, 3, 1)[LATENCY].tolist() == [3]


@pytest.mark.parametrize(
    ("previous", "said"),
    [
        (Previous(np.zeros((3, 2)), 1), r"have shape \(3, 2\), expected \(n, 1\) or \(2, n, 1\)"),
        (Previous(np.zeros((3, 4, 1)), 1), "expected"),
        (Previous(np.zeros((0, 1)), 1), "n >= 1"),
        (Previous(np.full((3, 1), np.nan), 1), "NaN"),
        (Previous(np.zeros((3, 1)), -1), "0 or more, got -1"),
        (Previous(np.zeros((3, 1)), np.array([1, 2, 3])), "one for each of 2 chunks"),
        (Previous(np.zeros((3, 1)), 1, np.inf), "got 1 and inf"),
    ],
)
def test_a_chunk_before_that_means_nothing_is_refused(previous, said):
    with pytest.raises(ObservationError, match=said):
        previous.inputs(2, 5, 1)
