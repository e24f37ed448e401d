"""One budget over all blocks: against brute force, per block and for the split."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from blockcache import Block, Fingerprint, Recording, solve
from blockcache.attach.action_costs import lower_mean, segment_costs
from blockcache.errors import RecordingError, ScheduleError
from blockcache.schedule import generation_flops
from blockcache.solvers.solve import split_budget, split_counts

EVERY_STEP = 7


def segments(steps, total):
    return zip(steps, (*(step - 1 for step in steps[1:]), total - 1), strict=True)


def error_of(costs, schedule):
    """Summed over blocks and segments, literally."""
    return sum(
        block[start, end]
        for block, steps in zip(costs, schedule, strict=True)
        for start, end in segments(steps, len(block))
    )


def schedules(steps):
    """Every schedule of one block."""
    return [(0, *rest) for count in range(steps) for rest in itertools.combinations(range(1, steps), count)]


@st.composite
def cases(draw, most_blocks=3, most_steps=4):
    blocks, steps = draw(st.integers(1, most_blocks)), draw(st.integers(1, most_steps))
    costs = draw(arrays(np.float64, (blocks, steps, steps), elements=st.integers(0, 20).map(float)))
    return costs, draw(st.lists(st.integers(1, 5), min_size=blocks, max_size=blocks))


@given(case=cases(1, 7), updates=st.integers(1, 7))
def test_one_block_is_solved_exactly_for_every_budget(case, updates):
    costs, (price,) = case
    found = split_budget(costs, [price], price * updates)
    affordable = [item for item in schedules(costs.shape[1]) if len(item) <= updates]
    assert found.error == error_of(costs, found.steps) == min(error_of(costs, [item]) for item in affordable)
    assert found.spent == price * len(found.steps[0]) <= price * updates


@given(case=cases(), extra=st.integers(0, 40))
def test_a_split_never_costs_more_than_the_budget_and_is_worth_what_it_says(case, extra):
    costs, prices = case
    limit = sum(prices) + extra
    found = split_budget(costs, prices, limit)
    assert found.spent == sum(price * len(steps) for price, steps in zip(prices, found.steps, strict=True)) <= limit
    assert found.error == pytest.approx(error_of(costs, found.steps))
    least = [min(error_of([block], [item]) for item in schedules(len(block))) for block in costs]
    if limit >= costs.shape[1] * sum(prices):
        assert found.error == pytest.approx(sum(least))


@given(case=cases(), trade=st.floats(0.01, 20))
def test_a_split_at_a_budget_of_the_hull_is_the_best_there_is(case, trade):
    """What minimises error + trade * price is the best schedule at its own price, whatever the trade."""
    costs, prices = case
    chosen = [
        min(schedules(costs.shape[1]), key=lambda item: error_of([block], [item]) + trade * price * len(item))
        for block, price in zip(costs, prices, strict=True)
    ]
    limit = sum(price * len(item) for price, item in zip(prices, chosen, strict=True))
    affordable = [
        error_of(costs, items)
        for items in itertools.product(schedules(costs.shape[1]), repeat=len(costs))
        if sum(price * len(item) for price, item in zip(prices, items, strict=True)) <= limit
    ]
    assert error_of(costs, chosen) == pytest.approx(min(affordable))
    assert split_budget(costs, prices, limit).error == pytest.approx(min(affordable))


def test_what_is_left_goes_to_the_best_raise_that_fits():
    """The hull of the first block leads straight from 1 to 4 updates; two of them are not worth nothing."""
    errors = np.array([[90.0, 80.0, 71.0, 0.0], [10.0, 9.0, 8.5, 8.0]])
    assert split_counts(errors, [1.0, 1.0], 6) == [4, 2]
    assert split_counts(errors, [1.0, 1.0], 4) == [3, 1]
    assert split_counts(errors, [9.0, 1.0], 12) == [1, 3]


def test_an_update_that_gains_nothing_is_not_made():
    assert split_counts(np.array([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), [1.0, 1.0], 100) == [2, 1]


def test_products_inside_a_segment_are_summed_before_they_are_squared():
    products = np.random.default_rng(0).normal(size=(2, 3, 4, 5, 5)).astype(np.float32)  # samples, V, blocks, s, k
    products *= np.triu(np.ones((5, 5)), 1)
    costs = segment_costs(products.copy())
    for sample, block, start, end in np.ndindex(2, 4, 5, 5):
        expected = np.mean([sum(products[sample, v, block, start, start + 1 : end + 1]) ** 2 for v in range(3)])
        assert costs[sample, block, start, end] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 2), (4, 3), (16, 12)])
def test_the_dearest_quarter_of_the_observations_does_not_count(count, kept):
    costs = np.random.default_rng(0).permuted(np.tile(np.arange(count, dtype=np.float32)[:, None], 3), axis=0)
    np.testing.assert_allclose(lower_mean(costs), np.full(3, np.arange(kept).mean()))


def recorded(steps=12, costs=(3, 5, 2), **changes):
    """Residuals as random walks: reusing one longer costs more."""
    blocks = tuple(Block(f"layers.{index}.FFN", "FFN", index, cost) for index, cost in enumerate(costs))
    walk = np.random.default_rng(0).normal(size=(len(blocks), steps, 8)).cumsum(axis=1)
    distances = np.square(walk[:, :, None] - walk[:, None]).mean(axis=-1)
    values = {
        "blocks": blocks,
        "matrices": {"mse": distances},
        "scores": np.ones(len(blocks)),
        "input_change": np.zeros((4, steps - 1)),
        "output_change": np.zeros((4, steps - 1)),
        "generations": 4,
        "fingerprint": Fingerprint(family="dp-t", weights="w" * 64),
        "action_costs": np.triu(distances).cumsum(axis=-1),
        "every_step": EVERY_STEP,
    }
    return Recording(**values | changes)


@pytest.mark.parametrize("budget", [0.48, 0.5, 0.7, 0.99, 1.0])
def test_a_budget_is_the_share_of_all_flops(budget):
    recording = recorded()
    schedule = solve(recording, method="action", budget=budget)
    full = generation_flops(recording.blocks, EVERY_STEP, 12)
    share = generation_flops(recording.blocks, EVERY_STEP, 12, schedule) / full
    assert budget - max(block.cost for block in recording.blocks) / full < share <= budget
    assert schedule.origin["share"] == pytest.approx(share)
    assert (schedule.origin["method"], schedule.origin["budget"]) == ("action", budget)
    assert schedule.origin["counted_in"] == "flops"
    assert schedule.fingerprint.weights == "w" * 64
    assert solve(recording, method="action", flops=budget * full).updates == schedule.updates


def test_updates_are_per_block_on_average():
    schedule = solve(recorded(), method="action", updates=4)
    assert schedule.computed == 12
    assert solve(recorded(), method="action", updates=3.5).computed == 10
    assert schedule.origin["updates"] == 4
    assert len({len(steps) for steps in schedule.updates.values()}) > 1


def test_nothing_asked_for_is_a_budget_of_15_percent():
    recording = recorded(every_step=0)
    assert solve(recording, method="action") == solve(recording, method="action", budget=0.15)


def test_measured_costs_take_the_place_of_flops():
    recording, names = recorded(), [f"layers.{index}.FFN" for index in range(3)]
    even = solve(recording, method="action", budget=0.5, costs=dict.fromkeys(names, 0.25))
    dear = solve(recording, method="action", budget=0.5, costs=dict(zip(names, (0.25, 25.0, 0.25), strict=True)))
    assert even.updates == solve(recording, method="action", updates=6).updates
    assert [len(dear.updates[names[index]]) for index in (0, 2)] == [12, 12]
    assert len(dear.updates[names[1]]) < len(even.updates[names[1]])
    assert even.origin["counted_in"] == "costs"


def test_without_a_trade_between_blocks_action_costs_are_acs_on_the_same_matrix():
    """Costs that are sums of distances from the first step: what ACS minimises, block by block."""
    recording = recorded(costs=(3,))
    for updates in range(1, 13):
        assert solve(recording, method="action", updates=updates).updates == (
            solve(recording, updates, metric="mse", method="blockwise").updates
        )


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"budget": 0.0}, "budget must be from 0.4608, one update of each block .* to 1, everything, got 0.0"),
        ({"budget": -1}, "budget must be from 0.4608"),
        ({"budget": 0.46}, "budget must be from 0.4608"),
        ({"budget": 1.01}, "to 1, everything, got 1.01"),
        ({"budget": float("nan")}, "budget must be a number, got nan"),
        ({"budget": True}, "budget must be a number, got True"),
        ({"flops": 93}, "flops must be from 94, .* to 204, everything, got 93"),
        ({"updates": 0.5}, "updates must be from 1, .* to 12"),
        ({"updates": 13}, "updates must be from 1, .* to 12"),
        ({"budget": 0.5, "updates": 3}, "takes one of updates, budget and flops, got updates and budget"),
        ({"budget": 0.5, "costs": {"layers.0.FFN": 1.0}}, "missing or unknown: ..layers.1.FFN"),
        (
            {"budget": 0.5, "costs": {f"layers.{i}.FFN": float(i) for i in range(3)}},
            "positive numbers, got 0.0 for lay",
        ),
        ({"updates": 3, "costs": {}}, "costs go with a budget"),
        ({"budget": 0.5, "last": True}, "last goes with the paper's methods"),
        ({"budget": 0.2, "method": "bac"}, "go with method 'action', got method 'bac'"),
    ],
)
def test_what_no_budget_is_is_refused(asked, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        solve(recorded(), **{"method": "action", **asked})


def test_a_budget_that_is_just_enough_is_taken():
    assert solve(recorded(), method="action", flops=94).computed == 3
    assert solve(recorded(), method="action", budget=94 / 204).computed == 3


def test_a_recording_without_action_costs_is_told_how_to_make_them():
    with pytest.raises(RecordingError, match=r"no action costs; .*'blockcache calibrate POLICY --action-costs'"):
        solve(recorded(action_costs=None), method="action", budget=0.5)


@pytest.mark.parametrize("changes", [{"every_step": None}, {"costs": (3, 0, 2)}])
def test_flops_that_nobody_knows_are_no_budget(changes):
    recording = recorded(**changes)
    with pytest.raises(ScheduleError, match="does not say the FLOPs"):
        solve(recording, method="action", budget=0.5)
    assert solve(recording, method="action", updates=2).computed == 6


def test_sizes_that_would_take_minutes_are_refused():
    with pytest.raises(ScheduleError, match="200 blocks of 1000 steps are more than this solver takes"):
        split_budget(np.broadcast_to(0.0, (200, 1000, 1000)), [1.0] * 200, 1000)


def test_a_file_keeps_action_costs(tmp_path):
    recording = recorded()
    recording.save(tmp_path / "r.safetensors")
    loaded = Recording.load(tmp_path / "r.safetensors")
    np.testing.assert_array_equal(loaded.action_costs, recording.action_costs)
    assert loaded.every_step == EVERY_STEP
    recorded(action_costs=None, every_step=None).save(tmp_path / "r.safetensors")  # as before there were any
    loaded = Recording.load(tmp_path / "r.safetensors")
    assert (loaded.action_costs, loaded.every_step) == (None, None)
    assert b"action_costs" not in (tmp_path / "r.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (np.zeros((3, 12, 11)), r"action_costs has shape \(3, 12, 11\), expected \(3, 12, 12\)"),
        (np.full((3, 12, 12), np.nan), "action_costs holds NaN or infinity"),
    ],
)
def test_wrong_action_costs_are_refused(wrong, sentence):
    with pytest.raises(RecordingError, match=sentence):
        recorded(action_costs=wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_wrong_flops_of_a_step_are_refused(wrong):
    with pytest.raises(RecordingError, match="a step's FLOPs outside the blocks must be a whole number"):
        recorded(every_step=wrong)
