"""From similarities to update steps: against brute force, against toy cases, against the paper's print."""

import itertools
import json
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from blockcache import Block, Fingerprint, Recording, solvers
from blockcache.errors import RecordingError, ScheduleError
from blockcache.solvers import adaptive, bubbling_union, consecutive, most_changing, solve, uniform
from blockcache.solvers.recording import METRICS

PRINTED = json.loads(resources.files("blockcache").joinpath("assets", "published_schedules.json").read_text("utf-8"))


def anchor_value(matrix, updates):
    """METHOD.md's objective, written down literally."""
    ends = (*updates[1:], len(matrix))
    return sum(matrix[start, t] for start, end in zip(updates, ends, strict=True) for t in range(start, end))


def brute_force(matrix, updates, maximise=True):
    """All choices in lexicographic order; the first of the best."""
    choices = [(0, *rest) for rest in itertools.combinations(range(1, len(matrix)), updates - 1)]
    best = max if maximise else min
    return best(choices, key=lambda choice: anchor_value(matrix, choice))


@st.composite
def cases(draw, elements):
    steps = draw(st.integers(1, 8))
    matrix = draw(arrays(np.float64, (steps, steps), elements=elements))
    return matrix, draw(st.integers(1, steps)), draw(st.booleans())


@given(case=cases(st.integers(-2, 2).map(float)))
def test_adaptive_is_brute_force_with_ties(case):
    """Small whole numbers add up exactly and tie all the time, so the choice itself must be the first of the best."""
    assert adaptive(*case) == brute_force(*case)


@given(case=cases(st.floats(-1, 1)), scale=st.sampled_from([1e-15, 1e-6, 1.0, 1e9]))
def test_adaptive_is_as_good_as_brute_force(case, scale):
    matrix, updates, maximise = case
    matrix = matrix * scale
    found = adaptive(matrix, updates, maximise)
    assert len(found) == updates
    assert found[0] == 0
    assert all(before < after for before, after in itertools.pairwise(found))
    best = anchor_value(matrix, brute_force(matrix, updates, maximise))
    size = np.abs(matrix).sum()
    assert abs(anchor_value(matrix, found) - best) <= 1e-10 * size


@pytest.mark.parametrize("scale", [1e-14, 1.0, 1e14])
def test_adaptive_on_an_asymmetric_matrix_of_any_size(scale):
    matrix = np.random.default_rng(0).normal(size=(9, 9)) * scale
    for updates in range(1, 10):
        assert adaptive(matrix, updates) == brute_force(matrix, updates)
        assert adaptive(matrix, updates, maximise=False) == brute_force(matrix, updates, maximise=False)


def test_adaptive_at_the_ends():
    matrix = np.random.default_rng(1).normal(size=(7, 7))
    assert adaptive(matrix, 1) == (0,)
    assert adaptive(matrix, 7) == (0, 1, 2, 3, 4, 5, 6)
    assert adaptive([[0.3]], 1) == (0,)


def test_adaptive_breaks_ties_lexicographically():
    assert adaptive(np.ones((6, 6)), 3) == (0, 1, 2)
    assert adaptive(np.zeros((6, 6)), 4, maximise=False) == (0, 1, 2, 3)


def test_adaptive_calls_rounding_a_tie():
    """0.1 + 0.2 + 0.3 is a hair more than 0.6 in floating point, but that is no reason for another schedule."""
    matrix = np.zeros((4, 4))
    matrix[0, 1:3] = 0.1, 0.2
    matrix[3, 3] = 0.3  # updates 0 and 3
    matrix[1, 1] = 0.6  # updates 0 and 1
    assert brute_force(matrix, 2) == (0, 3)
    assert adaptive(matrix, 2) == (0, 1)


def test_adaptive_finds_the_obvious():
    """Three phases in which nothing changes: one update at the start of each."""
    phase = np.repeat([0, 1, 2], [4, 5, 3])
    similarity = (phase[:, None] == phase[None, :]).astype(float)
    assert adaptive(similarity, 3) == (0, 4, 9)
    assert adaptive(1 - similarity, 3, maximise=False) == (0, 4, 9)


def test_adaptive_on_bands_longer_than_the_buffer():
    """K above the 64 rows that are added up at a time; the optimum is known by construction."""
    starts = (0, 3, 70, 71, 130, 190)
    phase = np.searchsorted(starts, np.arange(200), side="right")
    assert adaptive((phase[:, None] == phase[None, :]).astype(float), 6) == starts


def test_consecutive_takes_the_least_like_neighbours():
    matrix = np.ones((6, 6))
    for step, value in enumerate([0.9, 0.2, 0.8, 0.1, 0.7], start=1):
        matrix[step - 1, step] = value
    assert consecutive(matrix, 1) == (0,)
    assert consecutive(matrix, 3) == (0, 2, 4)
    assert consecutive(matrix, 4) == (0, 2, 4, 5)
    assert consecutive(1 - matrix, 3, maximise=False) == (0, 2, 4)
    assert consecutive(np.ones((6, 6)), 3) == (0, 1, 2)
    assert consecutive(matrix, 6) == (0, 1, 2, 3, 4, 5)


@given(steps=st.integers(1, 300), data=st.data())
def test_uniform_is_even(steps, data):
    updates = data.draw(st.integers(1, steps))
    found = uniform(steps, updates)
    assert len(found) == updates
    assert found[0] == 0
    gaps = np.diff([*found, steps])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("solver", [adaptive, consecutive])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_nan_is_refused(solver, wrong):
    matrix = np.ones((5, 5))
    matrix[3, 2] = wrong  # even in the half that nobody reads
    with pytest.raises(RecordingError, match="NaN or infinity"):
        solver(matrix, 2)


@pytest.mark.parametrize("shape", [(0, 0), (3,), (3, 4), (2, 3, 3)])
def test_a_matrix_that_is_not_square_is_refused(shape):
    with pytest.raises(RecordingError, match="square matrix"):
        adaptive(np.ones(shape), 1)


@pytest.mark.parametrize("updates", [0, -1, 6, 2.0, True, "3", None])
def test_a_wrong_number_of_updates_is_refused(updates):
    for call in (lambda: adaptive(np.ones((5, 5)), updates), lambda: uniform(5, updates)):
        with pytest.raises(ScheduleError, match="from 1 to the number of steps 5"):
            call()


TOY = {
    "layers.0.SA": [0, 1],
    "layers.0.FFN": [0, 2],
    "layers.1.SA": [0, 3],
    "layers.1.FFN": [0, 4],
    "layers.2.FFN": [0, 5],
}


@pytest.mark.parametrize(
    ("upstream", "changed"),
    [
        ([], {}),
        (["layers.0.SA"], {"layers.0.SA": (0, 1, 2, 4, 5)}),
        (["layers.0.FFN"], {"layers.0.FFN": (0, 2, 4, 5)}),
        (["layers.1.SA"], {"layers.1.SA": (0, 3, 4, 5)}),
        (["layers.2.FFN"], {}),  # nothing strictly behind it
        (["layers.1.FFN", "layers.0.FFN"], {"layers.0.FFN": (0, 2, 4, 5), "layers.1.FFN": (0, 4, 5)}),
    ],
)
def test_bubbling_union_on_toy_schedules(upstream, changed):
    expected = {name: tuple(steps) for name, steps in TOY.items()} | changed
    assert bubbling_union(TOY, upstream) == expected
    assert list(bubbling_union(TOY, upstream)) == list(TOY)


def test_bubbling_union_takes_kinds_from_blocks():
    """With `blocks` the kind is a field: here a name that ends in SA is a feed-forward block and the other way round."""
    blocks = [Block("a.SA", "FFN", 0, 0), Block("b.FFN", "SA", 1, 0), Block("c.SA", "FFN", 2, 0)]
    schedules = {"a.SA": (0, 1), "b.FFN": (0, 2), "c.SA": (0, 3)}
    assert bubbling_union(schedules, ["a.SA"], blocks)["a.SA"] == (0, 1, 3)
    assert bubbling_union(schedules, ["a.SA"])["a.SA"] == (0, 1, 2)


@pytest.mark.parametrize(
    ("upstream", "blocks", "named"),
    [
        (["layers.9.SA"], None, "'layers.9.SA' in upstream"),
        ("layers.0.SA", None, "'l' in upstream"),
        ([], [Block("layers.0.SA", "SA", 0, 0)], "'layers.0.FFN' in schedules"),
    ],
)
def test_bubbling_union_refuses_unknown_blocks(upstream, blocks, named):
    with pytest.raises(ScheduleError, match=named):
        bubbling_union(TOY, upstream, blocks)


def test_bubbling_union_leaves_its_argument_alone():
    before = {name: list(steps) for name, steps in TOY.items()}
    bubbling_union(TOY, ["layers.0.SA"])
    assert before == TOY


@pytest.mark.parametrize("task", PRINTED["tasks"])
def test_all_printed_unions_follow_from_the_printed_acs(task):
    printed = PRINTED["tasks"][task]
    result = bubbling_union(printed["acs"], printed["added"])
    for block, row in printed["added"].items():
        expected = tuple(sorted({*printed["acs"][block], *row}))
        assert (result[block] == expected) == (f"{task} {block}" not in PRINTED["misprints"]), block
    for block in set(printed["acs"]) - set(printed["added"]):
        assert result[block] == tuple(printed["acs"][block])


def test_there_are_53_printed_unions_and_two_misprints():
    assert sum(len(task["added"]) for task in PRINTED["tasks"].values()) == 53
    assert sorted(PRINTED["misprints"]) == ["can_ph layers.6.SA", "tool_hang_ph layers.1.FFN"]


def test_the_misprints_are_what_their_notes_say():
    can = PRINTED["tasks"]["can_ph"]
    corrected = bubbling_union(can["acs"], can["added"])["layers.6.SA"]
    assert set(corrected) - set(can["acs"]["layers.6.SA"]) - set(can["added"]["layers.6.SA"]) == {
        80,
        81,
        86,
        93,
        95,
        99,
    }
    hang = PRINTED["tasks"]["tool_hang_ph"]
    assert hang["added"]["layers.1.FFN"] == hang["added"]["layers.0.FFN"]
    behind = {step for layer in range(2, 8) for step in hang["acs"][f"layers.{layer}.FFN"]}
    corrected = bubbling_union(hang["acs"], hang["added"])["layers.1.FFN"]
    assert set(corrected) == behind | set(hang["acs"]["layers.1.FFN"])


def recorded(steps=12, seed=0, layers=3):
    blocks = tuple(
        Block(f"layers.{layer}.{kind}", kind, 3 * layer + order, 1)
        for layer in range(layers)
        for order, kind in enumerate(("SA", "CA", "FFN"))
    )
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(len(blocks), steps, 20)).cumsum(axis=1)
    return Recording(
        blocks=blocks,
        matrices={name: np.stack([metric(feature) for feature in features]) for name, metric in METRICS.items()},
        scores=np.array([1.0, 9, 2, 8, 3, 7, 4, 6, 5])[: len(blocks)],
        input_change=np.zeros((4, steps - 1)),
        output_change=np.zeros((4, steps - 1)),
        generations=4,
        fingerprint=Fingerprint(family="dp-t", weights="w" * 64),
    )


def test_solve_blockwise_is_acs_per_block():
    recording = recorded()
    for metric in METRICS:
        schedule = solve(recording, updates=4, metric=metric, method="blockwise")
        for block in recording.blocks:
            expected = adaptive(recording.matrix(metric, block.name), 4, maximise=metric == "cosine")
            assert schedule.updates[block.name] == expected
    different = {tuple(solve(recording, 4, metric=metric, method="blockwise").updates.values()) for metric in METRICS}
    assert len(different) > 1


def test_solve_bac_is_blockwise_and_union():
    recording = recorded()
    plain = solve(recording, updates=4, method="blockwise").updates
    assert most_changing(recording, 3) == ("layers.0.CA", "layers.1.SA", "layers.1.FFN")
    assert len(recording.blocks) == 9
    for count in range(10):
        schedule = solve(recording, updates=4, union=count)
        assert schedule.updates == bubbling_union(plain, most_changing(recording, count), recording.blocks)
    assert solve(recording, updates=4, union=0).updates == plain
    one = solve(recording, updates=4, union=1)
    assert [name for name in plain if one.updates[name] != plain[name]] == ["layers.0.CA"]
    assert solve(recording, updates=4).origin["union"] == 5


def test_a_union_nobody_asked_for_is_over_no_more_blocks_than_there_are():
    few = recorded(layers=1)
    assert (len(few.blocks), solve(few, updates=4).origin["union"]) == (3, 3)


@pytest.mark.parametrize("method", solvers.PAPER_METHODS)
def test_the_last_step_is_added_to_every_block_once_and_to_nothing_else(method):
    recording = recorded()
    for updates in (1, 3, recording.steps):
        plain, released = (solve(recording, updates, method=method, last=last) for last in (False, True))
        for name, steps in plain.updates.items():
            assert released.updates[name] == tuple(sorted({*steps, recording.steps - 1}))
        assert dict(released.origin) == {**plain.origin, "last": True}


def test_a_budget_by_the_action_takes_no_last_step():
    with pytest.raises(ScheduleError, match="last goes with the paper"):
        solve(recorded(), 4, method="action", last=True)


def test_solve_unified_is_the_first_block_for_all():
    recording = recorded()
    schedule = solve(recording, updates=4, method="unified")
    assert set(schedule.updates.values()) == {adaptive(recording.matrix("cosine", "layers.0.SA"), 4)}


def test_solve_uniform_needs_no_similarity():
    schedule = solve(recorded(), updates=4, method="uniform")
    assert set(schedule.updates.values()) == {(0, 3, 6, 9)}


def test_solve_consecutive_objective():
    recording = recorded()
    schedule = solve(recording, updates=4, method="blockwise", objective="consecutive")
    assert schedule.updates["layers.1.CA"] == consecutive(recording.matrix("cosine", "layers.1.CA"), 4)


@pytest.mark.parametrize("method", solvers.PAPER_METHODS)
def test_solve_binds_what_was_calibrated(method):
    recording = recorded()
    schedule = solve(recording, updates=4, method=method)
    assert schedule.fingerprint.weights == "w" * 64
    assert schedule.fingerprint.blocks == tuple(block.name for block in recording.blocks)
    assert schedule.steps == 12
    assert schedule.origin["method"] == method


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"metric": "L2"}, "unknown metric 'L2', known are cosine, mse, l1, wasserstein"),
        ({"method": "magic"}, "unknown method 'magic', known are bac, blockwise, unified, uniform"),
        ({"objective": "both"}, "unknown objective 'both'"),
        ({"updates": 0}, "updates must be"),
        ({"updates": 13}, "updates must be a whole number from 1 to the number of steps 12"),
        ({"union": -1}, "union must be 0 or a positive number"),
        ({"union": 2.0}, "union must be"),
        ({"union": True}, "union must be"),
        ({"union": 10}, "union is over 10 blocks, but there are only 9; ask for fewer"),
    ],
)
def test_solve_refuses(wrong, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        solve(recorded(), **{"updates": 4, **wrong})
