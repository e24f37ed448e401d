"""Tuning: what is chosen among points, what is looked at, how it goes on after a kill, and what it writes."""

import math
import re
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blockcache as bc
import foreign_policy
from blockcache.compare import block_times, trials, tuner
from blockcache.compare.candidates import Running
from blockcache.compare.dealing import deal, sizes_for_tuning
from blockcache.compare.time_box import TimeUpError
from blockcache.compare.tuned import Tuned, save_tuned
from blockcache.errors import ContentError, FileError, ObservationError
from blockcache.files import read
from blockcache.measure.distance import Distances
from blockcache.measure.latency import Latency
from blockcache.measure.statistics import Estimate
from blockcache.models.registry import port_of
from blockcache.observations import hash_observations, parts
from blockcache.report.document import Table
from blockcache.report.drawing import draw, save_figure
from blockcache.report.tuning import tuning_blocks, tuning_chart
from blockcache.results.losses import LossModel
from blockcache.results.tuning import Goal, Point, Tuning, TuningError, choose, front, promising
from blockcache.samplers import DDPM, ChosenSampler, Euler
from dit_policies import tiny_dit, tiny_observation
from engine_comparison import BLOCKS

DDPM4 = DDPM(num_inference_steps=4)
OBS = np.random.default_rng(0).standard_normal((30, 2, 5), dtype=np.float32)
UNLIKE = "nothing is promised of any method's loss"  # random weights are unlike any trained policy
BESIDE = "the policy beside those that losses were learnt on"


def estimate(mean, n=8):
    return Estimate(mean, mean - 0.01, mean + 0.01, n)


def point(method="full", ms=1.0, loss=0.0, spread=1.0, rollouts=None, threads=1):
    measured = Distances(estimate(loss), estimate(loss), estimate(spread), estimate(loss))
    return Point(method, "onnx", threads, ms, 1.2 * ms, 10**9, 24, measured, loss, rollouts)


# ---- choosing


def test_without_rollouts_a_loss_is_allowed_by_its_bound_alone():
    goal, fine, rash = (
        Goal(loss=0.05),
        replace(point("fine", 3.0, 0.02), bound=0.04),
        replace(point("rash", 1.0), bound=0.06),
    )
    assert choose([point(ms=9.0), fine, rash], goal) == fine
    assert goal.miss(rash) == pytest.approx(0.01)
    assert goal.miss(replace(rash, rollouts=estimate(0.0))) == 0  # rollouts tell more
    assert goal.miss(replace(rash, bound=None)) == 0  # a file of before it was kept
    assert Goal(loss=0.05, rollouts=True).miss(rash) == 0  # they are to come


def test_a_point_of_before_there_were_bounds_can_be_read():
    whole = asdict(point("ddpm-4"))
    assert read(Point, whole) == point("ddpm-4")
    del whole["bound"]
    assert read(Point, whole) == point("ddpm-4")
    del whole["loss"]
    with pytest.raises(ContentError, match="missing or unknown keys"):
        read(Point, whole)


POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8)


@given(POINTS)
def test_the_front_is_what_nothing_beats(values):
    points = [point(f"m{place}", ms, loss / 100) for place, (ms, loss) in enumerate(values)]
    kept = front(points)
    for one in points:
        beaten = any(
            other.p50_ms <= one.p50_ms
            and other.loss <= one.loss
            and (other.p50_ms, other.loss) != (one.p50_ms, one.loss)
            for other in points
        )
        assert any((one.p50_ms, one.loss) == (other.p50_ms, other.loss) for other in kept) is not beaten
    assert list(kept) == sorted(kept, key=lambda one: one.p50_ms)


@given(POINTS, st.integers(1, 10))
def test_a_deadline_takes_the_least_loss_within_it(values, deadline):
    points = [point(f"m{place}", ms, loss / 100) for place, (ms, loss) in enumerate(values)]
    chosen = choose(points, Goal(deadline_ms=deadline))
    inside = [one for one in points if one.p95_ms <= deadline]
    if inside:
        assert chosen.p95_ms <= deadline
        assert chosen.loss == min(one.loss for one in inside)
    else:
        assert chosen.p95_ms == min(one.p95_ms for one in points)
        assert Goal(deadline_ms=deadline).miss(chosen) == pytest.approx(chosen.p95_ms - deadline)


@given(POINTS, st.integers(1, 20))
def test_a_loss_takes_the_fastest_within_half_of_it(values, allowed):
    points = [point(f"m{place}", ms, loss / 100) for place, (ms, loss) in enumerate(values)]
    chosen = choose(points, Goal(loss=allowed / 100))
    inside = [one for one in points if one.loss <= allowed / 200]
    if inside:
        assert chosen.loss <= allowed / 200
        assert chosen.p50_ms == min(one.p50_ms for one in inside)
    else:
        assert chosen.loss == min(one.loss for one in points)


def test_of_methods_that_are_about_as_fast_the_one_that_loses_less_is_taken():
    goal = Goal(loss=0.03)
    points = [
        point("fast", 1.0, 0.014),
        point("as fast", 1.09, 0.002),
        point("slower", 1.2, 0.0),
        point("bad", 1.0, 0.02),
    ]
    assert choose(points, goal).method == "as fast"
    assert choose(points[::2], goal).method == "fast"
    assert choose(points[3:], goal).method == "bad"  # nothing meets the goal: the nearest miss


def test_what_was_rolled_out_counts_more_than_a_prediction():
    goal, predicted = Goal(loss=0.03), point("a", 1.0, 0.0)
    assert goal.miss(predicted) == 0.0
    assert goal.miss(replace(predicted, rollouts=Estimate(0.0, -0.05, 0.05, 100))) == pytest.approx(0.02)
    sure = replace(point("b", 1.0, 0.5), rollouts=Estimate(-0.01, -0.029, 0.009, 1000))
    assert goal.miss(sure) == 0.0  # the interval rules a loss of 0.03 out, whatever was predicted


def rolled_out(points, goal, lost):
    """The points after their rollouts, in which each method loses what `lost` says, and what was rolled out at a time."""
    asked = []

    def differences(points):
        asked.append([point.method for point in points])
        return {method: estimate(-lost.get(method, 0.2)) for method in asked[-1]}

    return tuner.roll_out(points, goal, differences), asked


def test_where_rollouts_contradict_the_prediction_the_next_ones_are_rolled_out():
    flattered = [point(f"f{ms}", ms) for ms in (1, 2, 3, 4)]
    safe, glanced = point("safe", 8, 0.01), replace(point("glanced", 5), chunks=3)
    goal = Goal(loss=0.1)
    found, asked = rolled_out([*flattered, glanced, safe, point("full", 9)], goal, {"safe": 0.02})
    assert asked == [["f1", "f2", "f3"], ["f4", "safe"]]  # a glance is the last to be believed
    assert choose([one for one in found if one.rollouts], goal).method == "safe"
    _, asked = rolled_out([*flattered, glanced, point("full", 9)], goal, {})
    assert asked == [["f1", "f2", "f3"], ["f4"], ["glanced"]]  # never the full policy, against itself
    _, asked = rolled_out([*flattered, safe], goal, {"f2": 0.02})
    assert asked == [["f1", "f2", "f3"]]


def test_what_cannot_be_rolled_out_is_tried_once():
    points = [point(f"f{ms}", ms) for ms in (1, 2, 3, 4)]
    assert tuner.roll_out(points, Goal(loss=0.1), lambda methods: {}) == points


def test_a_deadline_is_not_kept_the_better_by_more_rollouts():
    _, asked = rolled_out([point(f"f{ms}", ms) for ms in (1, 2, 3, 4)], Goal(deadline_ms=9), {})
    assert asked == [["f1", "f2", "f3"]]


def test_what_cannot_keep_the_spread_is_not_rolled_out():
    goal = Goal(loss=0.1, spread=(0.9, 1.1))
    _, asked = rolled_out([point("sharp", 1, spread=0.6), point("wide", 5)], goal, {})
    assert asked == [["wide"]]


def test_a_spread_that_must_be_kept_rules_points_out():
    goal = Goal(loss=0.03, spread=(0.9, 1.1))
    sharp, wide = point("sharp", 1.0, spread=0.6), point("wide", 5.0, spread=1.05)
    assert math.isinf(goal.miss(sharp))
    assert min([sharp, wide], key=goal.order) is wide


def test_the_front_is_looked_at_first():
    points = [point("slow", 9.0, 0.0), point("beaten", 9.5, 0.05), point("fast", 1.0, 0.02), point("worse", 1.1, 0.09)]
    assert [one.method for one in promising(points, Goal(loss=0.03), 3)] == ["slow", "fast", "beaten"]


@pytest.mark.parametrize(
    "asked", [{}, {"deadline_ms": 3, "loss": 0.1}, {"loss": 0.0}, {"deadline_ms": -1}, {"loss": math.nan}]
)
def test_what_is_wanted_is_one_thing(asked):
    with pytest.raises(TuningError):
        Goal(**asked)


# ---- which numbers of steps are worth minutes


class Predicted:
    """Looks whose loss and time depend on the number of steps alone, and that note what was asked."""

    def __init__(self, lossless_from, ms_a_step):
        self.asked, self.lossless_from, self.ms = [], lossless_from, ms_a_step

    first_samples = 12

    def measure(self, methods, samples):
        steps = methods[0].sampler.steps
        self.asked.append(steps)
        loss = 0.0 if steps >= self.lossless_from else 0.5
        return [point(method.name, self.ms * steps, loss) for method in methods]


@pytest.mark.parametrize(
    ("goal", "lossless_from", "ms", "asked"),
    [
        (Goal(loss=0.1), 4, 1.0, [5, 4, 3]),  # fewer, until one is too few
        (Goal(loss=0.1), 6, 1.0, [5, 6]),  # more, until they are enough
        (Goal(loss=0.1), 9, 1.0, [5, 6, 8]),
        (Goal(deadline_ms=8.0), 4, 1.0, [5, 6, 8]),  # 8 steps take 9.6 ms of 8
        (Goal(deadline_ms=4.0), 4, 1.0, [5, 4, 3]),
        (Goal(deadline_ms=1.0), 4, 1.0, [5, 4, 3]),
    ],
)
def test_minutes_go_to_the_steps_that_the_goal_allows(goal, lossless_from, ms, asked):
    seen = Predicted(lossless_from, ms)
    points = tuner.try_chosen_samplers(seen, goal, most=100)
    assert seen.asked == asked
    assert [one.method for one in points[:2]] == ["ddpm-5:placed", "fitted-5"]


def test_no_more_steps_are_chosen_than_the_policy_has():
    assert {one.method for one in tuner.try_chosen_samplers(Predicted(3, 1.0), Goal(loss=0.1), most=4)} == {
        "ddpm-3:placed", "fitted-3",
    }  # fmt: skip
    assert tuner.try_chosen_samplers(Predicted(3, 1.0), Goal(loss=0.1), most=3) == []


# ---- the longer look


class Sobering:
    """Looks that find in the long run what `really` says, and note who was looked at."""

    def __init__(self, really, rounds=9):
        self.really, self.asked, self.rounds = really, [], rounds

    def final_samples(self, count):
        return 48

    def measure(self, methods, samples, share):
        if len(self.asked) == self.rounds:  # the time is up
            return []
        self.asked.append((methods, samples))
        names = [method.name for method in methods]
        return [point(name, loss=self.really[name]) for name in names if name in self.really]


NAMES = [f"ddim-{n}" for n in range(1, 13)]
GLANCED = [point(name, 1.0 + n, 0.01) for n, name in enumerate(NAMES)]  # all seem good, the fastest ones most of all


@pytest.mark.parametrize(
    ("good_from", "rounds", "looked"),
    [
        (0, 9, 5),  # the first five keep what they promised
        (7, 9, 10),  # they do not: the next five are looked at
        (99, 9, 12),  # nobody does
        (99, 2, 10),  # the time is up
    ],
)
def test_where_a_glance_was_too_kind_the_next_ones_are_looked_at(good_from, rounds, looked):
    seen = Sobering({name: 0.0 if n >= good_from else 0.5 for n, name in enumerate(NAMES)}, rounds)
    found = tuner.try_finalists(seen, GLANCED, Goal(loss=0.03))
    assert list(found) == NAMES[:looked]
    assert {samples for _, samples in seen.asked} == {48}


def test_what_seemed_to_miss_the_goal_is_not_looked_at_for_want_of_better():
    bad = [point(f"ddpm-{n + 1}", 0.5 + n, 0.4) for n in range(8)]
    seen = Sobering({one.method: 0.5 for one in [*GLANCED, *bad]})
    assert set(tuner.try_finalists(seen, [*GLANCED, *bad], Goal(loss=0.03))) >= {one.method for one in GLANCED}
    assert len(seen.asked) == 3


# ---- dealing observations


def test_no_observation_serves_two_purposes():
    dealt = deal(OBS, {}, sizes_for_tuning(len(OBS)))
    names = [{hash_observations(one) for one in parts(part, 1)} for part in dealt.values()]
    assert [len(part) for part in names] == [9, 11, 10]
    assert len(set.union(*names)) == sum(map(len, names))
    with pytest.raises(ObservationError, match=r"need 24 different observations, got 20"):
        deal(OBS[:20], {}, sizes_for_tuning(20))


# ---- a whole tuning


@pytest.fixture
def small(monkeypatch):
    for name, value in {
        "STEPS": (4, 3), "CHOSEN_STEPS": (), "OWN_BUDGETS": (0.9, 0.8, 0.7, 0.6), "BUDGETS": (0.7,),
        "FINALISTS": 4,
    }.items():  # fmt: skip
        monkeypatch.setattr(tuner, name, value)
    monkeypatch.setattr(trials, "FIRST_SAMPLES", 4)
    monkeypatch.setattr(trials, "FINAL_SAMPLES", 6)
    monkeypatch.setattr(trials, "cores", lambda: 1)  # more threads take their time on a machine that others use too
    monkeypatch.setattr(trials, "FIRST_CALLS", 1)
    monkeypatch.setattr(trials, "FINAL_CALLS", 2)
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)


@pytest.fixture
def run(small, tmp_path):
    def go(policy, **changes):
        wanted = {} if "deadline_ms" in changes else {"loss": 0.5}
        seen = changes.pop("observations", OBS)
        settings = {"state": tmp_path / "state", "engine": "loop", "rate_hz": 1e4, "progress": False} | wanted | changes
        return tuner.tune(policy, seen, **settings)

    return go


def test_all_kinds_of_methods_are_looked_at_and_one_is_chosen(policy, run):
    found = run(policy).tuning
    looked_at = {one.method for one in found.points}
    assert "full" in looked_at  # whatever it is that was chosen
    assert len(looked_at) >= 4
    assert [note.partition(":")[0] for note in found.notes] == [UNLIKE, BESIDE]
    assert found.chosen.method == "full"  # the one that needs no promise
    assert {one.bound for one in found.points} == {0.0, 1.0}
    assert found.chosen in found.points
    assert found.met is (found.goal.miss(found.chosen) == 0)
    assert found.plain_ms > 0
    assert {one.threads for one in found.points} <= {1, torch.get_num_threads(), trials.cores()}


def test_by_bounds_alone_the_fastest_is_taken_that_has_one_within_the_loss(policy, run, monkeypatch):
    """Fewer steps are faster and further from the policy's own: just below a bound the next slower method is taken."""
    ranges = {
        "executed actions of a chunk": (1, 99),
        "its actions' spread": (1e-6, 1e6),
        "its actions' roughness": (1e-6, 1e6),
    }
    model = LossModel("two tasks", 1, ("dp-t",), ranges, {"root of energy beyond spread": 0.05}, 1.2, {"dp-t": 2})
    monkeypatch.setattr("blockcache.results.losses.shipped_model", lambda: model)
    monkeypatch.setattr(tuner, "OWN_BUDGETS", ())
    monkeypatch.setattr(tuner, "BUDGETS", ())
    ms = {"ddpm-3": 1.0, "ddpm-4": 2.0, "full": 9.0}
    monkeypatch.setattr(trials.Trials, "_milliseconds", lambda self, asked, calls: {
        name: (9.0, 9.0) if isinstance(name, str) else (ms[name[0]], ms[name[0]]) for name in asked
    })  # fmt: skip
    bounds = {one.method: one.bound for one in run(policy, loss=0.3).tuning.points}
    assert 0 == bounds["full"] < bounds["ddpm-4"] < bounds["ddpm-3"] < 0.3
    little = 1e-9
    for loss, method in (
        (bounds["ddpm-3"] + little, "ddpm-3"),
        (bounds["ddpm-3"] - little, "ddpm-4"),
        (bounds["ddpm-4"] + little, "ddpm-4"),
        (bounds["ddpm-4"] - little, "full"),
    ):
        found = run(policy, loss=loss).tuning
        assert (found.chosen.method, found.met, found.fresh) == (method, True, None)
        assert all(one.rollouts is None for one in found.points)
        assert [note.partition(":")[0] for note in found.notes] == [BESIDE]
    text = tuning_blocks(run(policy, loss=bounds["ddpm-3"] + little).tuning)[0].text
    assert f"is predicted, with 90 % certainty it loses at most {bounds['ddpm-3']:.3f}; `--task` measures it" in text


@pytest.mark.parametrize("nothing", [None, [], OBS[:0]])
def test_a_tuning_without_observations_is_told_how_to_get_some(policy, run, nothing):
    with pytest.raises(
        ObservationError, match="tuning needs observations that the policy meets, such as 'blockcache policy"
    ):
        run(policy, observations=nothing)


def test_without_a_directory_nothing_is_left(policy, run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = run(policy, state=None, keep_sampler=True)
    assert found.tuning.chosen in found.tuning.points
    assert list(tmp_path.iterdir()) == []


def test_a_flow_is_tuned_too(run, monkeypatch):
    """Fewer Euler steps, blocks reused, and both; nothing that only a diffusion has."""
    asked, at = [], trials.Trials.measure
    monkeypatch.setattr(trials.Trials, "measure", lambda self, names, *more, **named: (
        asked.extend(method.name for method in names), at(self, names, *more, **named)
    )[1])  # fmt: skip
    found = run(tiny_dit(sampler=Euler(num_inference_steps=5)), observations=tiny_observation(30))
    assert [note.partition(":")[0] for note in found.tuning.notes] == [UNLIKE, BESIDE]
    kinds = {method.partition("-")[0].partition(":")[0] for method in asked}
    assert kinds == {"full", "euler", "action"}
    assert {"euler-4", "euler-3", "euler-4+action:budget=0.7"} <= set(asked)
    assert found.sampler is None or isinstance(found.sampler, Euler)


@pytest.mark.parametrize("faster", ["onnx", "loop"])
def test_every_point_gets_its_fastest_engine_and_threads(policy, run, monkeypatch, faster):
    def told(self, asked, calls):
        """One thread of the faster engine takes 1 ms, anything else 5."""
        return {name: (1.0, 2.0) if name[1:] == (faster, 1) else (5.0, 6.0) for name in asked}

    monkeypatch.setattr(trials.Trials, "_milliseconds", told)
    found = run(policy, engine="auto").tuning
    assert {(one.engine, one.threads, one.p50_ms) for one in found.points} == {(faster, 1, 1.0)}
    assert found.plain_ms == 5.0


def test_a_tuning_goes_on_where_it_was_killed(policy, run, monkeypatch, tmp_path):
    drawn, seed_of = [], trials.seed_of

    def counted(*place):
        if len(drawn) == killed_at:
            raise KeyboardInterrupt
        drawn.append(place)
        return seed_of(*place)

    monkeypatch.setattr(trials, "seed_of", counted)
    monkeypatch.setattr(tuner, "FINALISTS", 99)  # all: which ones are promising depends on times, as do budgets
    monkeypatch.setattr(trials.Trials, "_block_costs", lambda self: dict.fromkeys(BLOCKS, 1.0))
    killed_at = None
    whole = run(policy, state=tmp_path / "another").tuning
    total = len(drawn)
    drawn.clear()
    killed_at = 7  # in the middle of the second method's cloud
    with pytest.raises(KeyboardInterrupt):
        run(policy)
    killed_at = None
    resumed = run(policy).tuning
    found = {one.method: one.distances for one in resumed.points}
    assert found == {one.method: one.distances for one in whole.points}
    assert len(drawn) == total  # no chunk was drawn twice
    run(policy)
    assert len(drawn) == total


def test_what_cannot_be_made_is_noted_and_the_rest_goes_on(policy, run, monkeypatch):
    cloud = trials.Trials._cloud

    def broken(self, candidate, *more):
        if candidate.sampler is not None:
            raise bc.BlockcacheError("no such luck")
        return cloud(self, candidate, *more)

    monkeypatch.setattr(trials.Trials, "_cloud", broken)
    found = run(policy).tuning
    assert any("ddpm-4 was left out: BlockcacheError: no such luck" in note for note in found.notes)
    assert {one.method.partition(":")[0] for one in found.points} <= {"full", "action"}


class SlowPolicy:
    """A clock that only moves while actions are drawn or timed, or an engine is opened: each takes what it is said to."""

    def __init__(self, monkeypatch, chunk, opening):
        self.now, self.chunk, self.told = 1000.0, chunk, []
        monkeypatch.setattr("blockcache.compare.time_box.time", self)
        monkeypatch.setattr(trials, "time", self)
        monkeypatch.setattr("blockcache.measure.latency.time", self)
        act, opened, clock = Running.act, trials.running, self

        def acted(running, obs, seed):
            clock.sleep(chunk * len(obs) * len(running.port.timesteps) / 6)
            return act(running, obs, seed)

        @contextmanager
        def open_engine(port, candidate):
            clock.sleep(opening)
            with opened(port, candidate) as fast:
                yield fast

        def timed(running, obs):
            return lambda: clock.sleep(chunk * len(running.port.timesteps) / 6)

        monkeypatch.setattr(Running, "act", acted)
        monkeypatch.setattr(Running, "timed", timed)
        monkeypatch.setattr(trials, "running", open_engine)
        monkeypatch.setattr(trials.Trials, "_block_costs", lambda self: dict.fromkeys(BLOCKS, 1.0))

    def monotonic(self):
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds):
        self.now += max(0.0, seconds)


def test_an_engine_that_refuses_the_policy_is_not_taken_for_want_of_time(policy, run, monkeypatch):
    def refuse(self, *arguments):
        raise ObservationError("its actions differ")

    monkeypatch.setattr(Running, "act", refuse)
    monkeypatch.setattr(trials.Trials, "_block_costs", refuse)
    budget = trials.Calibrations.candidate

    def late(self, method, engine):
        if method.reuse is not None:
            raise TimeUpError("no time for this")
        return budget(self, method, engine)

    monkeypatch.setattr(trials.Calibrations, "candidate", late)
    with pytest.raises(TuningError, match=r"^no method could be tried: full was left out: .*its actions differ"):
        run(policy)


@pytest.mark.parametrize("minutes", [0.2, 1, 10])
@pytest.mark.parametrize("chunk", [0.0003, 0.01, 0.1, 1.0])
def test_the_time_is_kept_and_something_comes_of_it(policy, run, monkeypatch, minutes, chunk):
    clock = SlowPolicy(monkeypatch, chunk, opening=0.1)
    began, needed = clock.now, None
    try:
        found = run(policy, minutes=minutes, rate_hz=10).tuning
    except TuningError as error:
        assert chunk * 8 * 4 > 0.2 * 60 * minutes  # not even eight states with four chunks each
        needed = float(re.fullmatch(r"nothing was tried: .* give it ([\d.]+) minutes .*", str(error))[1])
    else:
        assert {"full"} < {one.method for one in found.points}
        assert found.setting["rate_hz"] == 10
    assert clock.now - began <= 1.1 * 60 * minutes
    if needed is not None:
        began = clock.now
        found = run(policy, minutes=needed, rate_hz=10).tuning  # what it was told to do helps
        assert len(found.points) > 1
        assert clock.now - began <= 1.1 * 60 * needed


def test_the_same_command_goes_on_with_what_it_had_no_time_for(policy, run, monkeypatch):
    """The policy's own cloud takes longer than one run has: it is kept as it grows."""
    clock, found = SlowPolicy(monkeypatch, 3.0, opening=0.1), []
    for _ in range(20):
        began = clock.now
        try:
            found.append(run(policy, minutes=0.5).tuning)
            break
        except TuningError as error:
            found.append(error)
        assert clock.now - began <= 1.1 * 30
    assert len(found) > 1
    assert {"full"} < {one.method for one in found[-1].points}


def test_more_minutes_know_more_of_the_same(policy, run, monkeypatch):
    SlowPolicy(monkeypatch, 0.3, opening=0.1)
    short, longer = (run(policy, minutes=minutes).tuning for minutes in (0.8, 20))
    assert 8 * 4 <= short.chosen.chunks < longer.chosen.chunks == 6 * 10
    assert any("not tried, as the time was up: " in note and "with more minutes" in note for note in short.notes)
    assert [note.partition(":")[0] for note in longer.notes] == [UNLIKE, BESIDE]


def test_where_there_is_no_terminal_a_line_is_written_now_and_then(policy, run, monkeypatch, capsys):
    SlowPolicy(monkeypatch, 0.5, opening=0.1)
    run(policy, minutes=3, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 3 * 60 / 15
    assert all(re.fullmatch(r"\d+ of 180 s: (\S+)", line) for line in lines)


@pytest.mark.parametrize(
    ("changes", "odd"),
    [({"seed": 3}, "seed"), ({"observations": OBS + 1}, "observations"), ({"other": True}, "policy")],
)
def test_a_state_belongs_to_one_policy_and_one_set_of_observations(make_policy, run, tmp_path, changes, odd):
    tuner._claim(tmp_path / "state", port_of(make_policy()), OBS, 0)
    other = make_policy(seed=1 if changes.pop("other", False) else 0)
    with pytest.raises(TuningError, match=f"holds a tuning with another {odd}; tune into another directory"):
        run(other, **changes)


def test_times_of_another_machine_are_not_mixed_in(policy, run, tmp_path, monkeypatch):
    tuner._claim(tmp_path / "state", port_of(policy), OBS, 0)
    monkeypatch.setattr(tuner, "describe", lambda: {"processor": "abacus", "cores": 1})
    with pytest.raises(TuningError, match="holds a tuning with another machine"):
        run(policy)


def test_a_deadline_that_one_step_does_not_keep_is_refused(policy, run):
    with pytest.raises(
        TuningError, match=r"a deadline of 0.0001 ms cannot be met here: a chunk of one single .* takes"
    ):
        run(policy, deadline_ms=0.0001)


def test_a_goal_that_nothing_meets_is_said_with_the_nearest_miss(policy, run):
    found = run(policy, loss=1e-9, keep_spread=True).tuning
    (answer, *_) = tuning_blocks(replace(found, goal=Goal(loss=1e-9), chosen=point("ddpm-3", loss=0.4)))
    assert "Nothing was found for a loss of at most 1e-09; nearest is" in answer.text
    assert "It misses by 0.4 of the score. Not rolled out" in answer.text


def test_what_was_measured_on_fresh_seeds_is_said_of_a_miss_too(policy, run):
    missed = replace(point("fitted-4", 2.0, rollouts=Estimate(-0.04, -0.104, 0.02, 200)), threads=1)
    fresh = Estimate(-0.09, -0.149, -0.035, 200)
    found = replace(run(policy).tuning, goal=Goal(loss=0.1), points=(missed,), chosen=missed, fresh=fresh)
    text = tuning_blocks(found)[0].text
    assert "Nothing was found for a loss of at most 0.1; nearest is **fitted-4**" in text
    assert "misses by 0.004 of the score. On 200 fresh pairs of rollouts its score differs by -0.090" in text
    assert (
        "a loss of 0.1 is not ruled out. Without rollouts a loss of 0.000 is predicted, its bound was not kept" in text
    )


def test_the_full_policy_can_be_the_answer(policy, run):
    full = point("full", 9.0)
    text = tuning_blocks(replace(run(policy).tuning, goal=Goal(loss=0.1), points=(full,), chosen=full))[0].text
    assert text.endswith("It computes every block at every step, and loses nothing.")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("action:budget=0.2", "only what its blocks reuse is changed"),
        ("dpmsolver++-5", "Plain fewer steps won"),
        ("dpmsolver++-5+action:budget=0.5", "another sampler than the policy's own"),
        ("ddpm-5:placed", "another sampler than the policy's own"),
    ],
)
def test_what_was_changed_of_the_policy_is_said(policy, run, method, words):
    chosen = point(method)
    *_, notes = tuning_blocks(replace(run(policy).tuning, points=(chosen,), chosen=chosen))
    assert any(words in item for item in notes.items)


def test_reuse_is_tried_on_top_of_every_sampler_whatever_its_name():
    points = [
        point("dpmsolver++-5", 5, 0.01),
        point("ddim-6", 6, 0.02),
        point("full", 20),
        point("action:budget=0.2", 9),
    ]
    assert [method.name for method in tuner.cached_methods(points, Goal(loss=0.1))] == [
        f"{name}+action:budget={budget:g}" for name in ("dpmsolver++-5", "ddim-6") for budget in tuner.BUDGETS
    ]


def test_with_the_sampler_kept_only_schedules_are_tried(policy, run):
    found = run(policy, keep_sampler=True)
    assert found.sampler is None
    assert {one.method.partition(":")[0] for one in found.tuning.points} <= {"full", "action"}


# ---- what it writes


def test_the_file_comes_back_as_it_was(policy, run, tmp_path):
    found = run(policy).tuning
    found.save(tmp_path / "tuning.json")
    assert Tuning.load(tmp_path / "tuning.json") == found
    text = (tmp_path / "tuning.json").read_text()
    (tmp_path / "tuning.json").write_text(text.replace(f'"chosen": "{found.chosen.method}', '"chosen": "another'))
    with pytest.raises(FileError, match="it has 0 points called"):
        Tuning.load(tmp_path / "tuning.json")


def test_the_directory_is_a_policy_that_export_takes(policy, run, tmp_path, blockcache):
    found = run(policy)
    points = {one.method: one for one in found.tuning.points}
    sampler = DDPM4
    schedule = bc.Schedule(4, dict.fromkeys(BLOCKS, (0, 2)), port_of(policy.with_sampler(sampler)).fingerprint)
    chosen = ChosenSampler(sampler, port_of(policy).fingerprint, {"after": 0.5})
    written = save_tuned(policy, Tuned(found.tuning, chosen, schedule), tmp_path / "tuned")
    assert written is True
    assert ChosenSampler.load(tmp_path / "tuned/sampler.json").evidence == {"after": 0.5}
    assert points
    loaded = bc.load_policy(tmp_path / "tuned")
    obs, noise = torch.from_numpy(OBS[:2]), torch.randn(4, 2, 6, 3, generator=torch.Generator().manual_seed(0))
    expected = policy.with_sampler(sampler).predict_action(obs, noise=noise)["action"]
    torch.testing.assert_close(loaded.predict_action(obs, noise=noise)["action"], expected, rtol=0, atol=0)
    blockcache("export", tmp_path / "tuned", "-o", tmp_path / "fast.onnx")
    exported = bc.open_export(tmp_path / "fast.onnx")
    with bc.accelerate(loaded, schedule, engine="patched") as fast:
        expected = fast.predict_action(obs, noise=noise)["action"]
    torch.testing.assert_close(exported.predict_action(obs, noise=noise)["action"], expected, rtol=1e-5, atol=1e-5)


def test_a_foreign_policy_gets_its_sampler_and_schedule(run, tmp_path):
    policy = foreign_policy.Policy()
    seen = np.random.default_rng(0).standard_normal((30, policy.n_obs_steps, policy.obs_dim), dtype=np.float32)
    found = run(policy, observations=seen, keep_sampler=True, engine="patched")
    assert save_tuned(policy, found, tmp_path / "tuned") is False
    names = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert "tuning.json" in names
    assert "config.json" not in names


def test_a_tuning_that_goes_on_is_written_over_the_earlier_one(policy, run, tmp_path):
    """Of an earlier tuning nothing stays: the later one took the policy's own sampler."""
    found = run(policy)
    chosen = ChosenSampler(DDPM4, port_of(policy).fingerprint, {"after": 0.5})
    for sampler, expected in ((chosen, True), (chosen, True), (None, False)):
        save_tuned(policy, Tuned(found.tuning, sampler, None), tmp_path / "tuned")
        assert (tmp_path / "tuned/sampler.json").exists() is expected
        assert bc.load_policy(tmp_path / "tuned").sampler == (DDPM4 if expected else policy.sampler)
    (tmp_path / "tuned/notes.txt").write_text("mine")
    with pytest.raises(FileError, match=r"holds notes\.txt besides a policy"):
        save_tuned(policy, Tuned(found.tuning, chosen, None), tmp_path / "tuned")
    assert Tuning.load(tmp_path / "tuned/tuning.json").chosen == found.tuning.chosen


# ---- what it shows


def test_the_table_marks_the_front_and_the_choice(tmp_path):
    points = (point("ddpm-5", 1.0, 0.02), point("ddpm-16", 9.0, 0.0), point("ddim-16", 9.5, 0.05))
    found = Tuning(
        policy={"source": "x", "fingerprint": bc.Fingerprint().to_dict()}, goal=Goal(deadline_ms=5.0), setting={},
        machine={}, plain_ms=90.0, points=points, chosen=points[0], fresh=None, notes=(),
    )  # fmt: skip
    answer, shown, _ = tuning_blocks(found)
    assert "The best within 5 ms is **ddpm-5**" in answer.text
    assert "90x the plain policy" in answer.text
    assert isinstance(shown, Table)
    assert [row[0] for row in shown.rows] == ["chosen", "front", ""]
    chart = tuning_chart(found, named=True)
    front, predicted, chosen = chart.panels[0].layers  # nothing was rolled out
    assert (front.x, front.line) == (pytest.approx((1.2, 10.8)), True)  # p95, which a deadline is judged by
    assert predicted.labels == ("ddpm-5", "ddpm-16", "ddim-16")
    assert (chosen.name, chosen.x) == ("chosen", (1.2,))
    save_figure(draw(chart), tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    fresh = replace(found, fresh=Estimate(0.001, -0.02, 0.02, 500))
    assert (
        "On 500 fresh pairs of rollouts its score differs by +0.001 [-0.020, +0.020]: a loss of 0.03 is ruled out"
        in tuning_blocks(fresh)[0].text
    )


# ---- what blocks cost


def test_an_update_of_a_block_costs_what_it_takes(policy, monkeypatch):
    """Calls that take as long as their updates say: SA 1 ms, CA 2, FFN 4, and 10 ms besides."""
    price = {"SA": 1, "CA": 2, "FFN": 4}

    def timed(calls, repeats, progress):
        spent = {}
        for name, call in calls.items():
            updates = call.schedule.updates
            ms = 10 + sum(price[block.rpartition(".")[2]] * len(at) for block, at in updates.items())
            spent[name] = Latency(np.full(repeats, ms / 1e3))
        return spent

    class Idle:
        def __init__(self, port, candidate):
            self.schedule = candidate.strategy

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def timed(self, obs):
            return self

    monkeypatch.setattr(block_times, "measure", timed)
    monkeypatch.setattr(block_times, "running", Idle)
    found = block_times.block_milliseconds(port_of(policy), OBS[:1], "loop")
    assert list(found) == list(BLOCKS)
    assert found == {name: pytest.approx(price[name.rpartition(".")[2]]) for name in BLOCKS}


def test_blocks_that_cost_nothing_measurable_still_cost_something(policy, monkeypatch):
    monkeypatch.setattr(
        block_times, "measure", lambda calls, repeats, progress: dict.fromkeys(calls, Latency(np.ones(repeats)))
    )
    assert all(0 < ms < 1e-3 for ms in block_times.block_milliseconds(port_of(policy), OBS[:1], "loop").values())
