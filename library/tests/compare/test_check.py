"""Judging a schedule without a simulator: what is drawn, what is compared with what, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import blockcache as bc
import foreign_policy
from blockcache.compare.candidates import Candidate, running
from blockcache.compare.checker import check
from blockcache.errors import FileError, ObservationError, PolicyError
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.action_error import ActionError
from blockcache.measure.distance import Distances
from blockcache.measure.features import ActionFeatures, flattened
from blockcache.measure.statistics import Estimate
from blockcache.models.registry import port_of
from blockcache.report.check import check_blocks
from blockcache.results.check import ENERGIES, SHIFTS, Check, Roughness

OBS = np.random.default_rng(0).standard_normal((14, 2, 5), dtype=np.float32)
QUICK = {"count": 4, "samples": 8, "generations": 3, "engine": "loop", "progress": False}
MOMENTS = np.array([(episode, place) for place in range(7) for episode in (30, 31)])


# ---- clouds


def recorder(calls):
    def act(obs, seed):
        calls.append((len(obs), seed))
        return np.tile(np.float64(seed), (len(obs), 4, 3)) + obs[:, :1, :3]

    return act


def test_a_sample_is_a_pass_over_all_observations_with_a_seed_of_its_own():
    calls = []
    chunks = draw_chunks(recorder(calls), OBS, 3, np.array([1.0, 2, 4]), seed=5, batch=6)
    assert chunks.shape == (14, 3, 4, 3)
    assert [size for size, _ in calls] == [6, 6, 2] * 3
    assert len({seed for _, seed in calls}) == 9
    first = calls[0][1]
    np.testing.assert_allclose(chunks[2, 0, 1], (np.float64(first) + OBS[2, 0, :3]) * [1, 2, 4])
    fewer = draw_chunks(recorder([]), OBS, 2, np.array([1.0, 2, 4]), seed=5, batch=6)
    np.testing.assert_array_equal(fewer, chunks[:, :2])
    neighbour = []
    draw_chunks(recorder(neighbour), OBS, 3, np.ones(3), seed=6, batch=6)
    assert not {seed for _, seed in neighbour} & {seed for _, seed in calls}
    assert flattened(chunks).shape == (14, 3, 12)


def test_the_same_seed_is_the_same_noise_for_whatever_runs(make_policy):
    port = port_of(make_policy())
    with running(port, Candidate()) as plain, running(port, Candidate(engine="patched")) as fast:
        one, other = (draw_chunks(run.act, OBS[:3], 2, port.action_scale, 1) for run in (plain, fast))
    np.testing.assert_array_equal(one, other)
    assert (one[:, 0] != one[:, 1]).any(axis=(1, 2)).all()


# ---- the check


@pytest.fixture
def drawn(monkeypatch):
    """What was drawn: (observations, samples, seed) of every cloud, in order."""
    calls = []

    def draw(act, observations, samples, scale, seed, **how):
        calls.append((np.asarray(observations), samples, seed))
        return draw_chunks(act, observations, samples, scale, seed, **how)

    monkeypatch.setattr("blockcache.compare.checker.draw_chunks", draw)
    return calls


def test_every_step_computed_is_the_full_policy_with_the_same_noise_and_so_at_distance_0(make_policy, drawn):
    policy = make_policy()
    names = [block.name for block in port_of(policy).adapter.blocks]
    found = check(policy, bc.Schedule.every_step(6, names), OBS, **QUICK)
    assert found.error.mean < 1e-6 < found.noise_floor.mean
    (_, half, one), (_, _, other), *again = drawn
    assert half == 4
    assert one != other  # the floor is of independent noise
    assert [(samples, seed) for _, samples, seed in again] == [(4, one), (4, other)]
    assert found.distances.centre_shift.mean == pytest.approx(0, abs=1e-3)  # roots of rounding errors
    assert found.distances.energy.mean == pytest.approx(0, abs=1e-5)
    assert found.distances.spread.mean == pytest.approx(1, abs=1e-5)
    assert found.floor.energy.high > 1e-3
    assert found.verdict == "looks lossless"
    assert found.method["flops"] == found.method["full_flops"]
    assert found.roughness.jerk == pytest.approx(found.full_roughness.jerk)
    assert found.roughness.seam is None


def test_nothing_is_compared_at_what_was_calibrated_on(make_policy, drawn):
    obs = OBS.copy()
    obs[5] = obs[9] = obs[0]  # the very same state again
    obs[6] = obs[7]
    check(make_policy(), "uniform:S=2", obs, **QUICK | {"count": 8})
    (seen, *_), *_ = drawn
    assert len(seen) == len({row.tobytes() for row in seen}) == 8
    assert not {row.tobytes() for row in seen} & {row.tobytes() for row in obs[:3]}
    with pytest.raises(ObservationError, match="9 for distances need 9 different observations, got 8; give more"):
        check(make_policy(), "uniform:S=2", obs, **QUICK | {"count": 9})


def test_a_schedule_that_reuses_is_seen_and_a_method_is_solved_from_the_first_observations(make_policy):
    policy = make_policy()
    found = check(policy, "bac:S=2,n=1,last=1", OBS, moments=MOMENTS, **QUICK)
    assert found.error.mean > 1e-3
    assert found.method["name"] == "bac:S=2,n=1,last=1"
    assert found.method["flops"] < found.method["full_flops"]
    recording = bc.calibrate(policy, torch.as_tensor(OBS[:3]).split(1), progress=False)
    schedule = bc.solve(recording, 2, 1, last=True)
    assert found.method["reuse"] == schedule.describe()
    again = check(policy, schedule, OBS, moments=MOMENTS, name="bac:S=2,n=1,last=1", **QUICK)
    assert again == found
    assert found.setting["seams"] == 9  # of 12 that follow each other, three begin among the first three
    assert found.roughness.seam != found.full_roughness.seam


def test_the_jump_is_from_the_last_action_to_the_first_of_the_next_chunk(make_policy, drawn):
    policy = make_policy()
    found = check(policy, "full", OBS, moments=MOMENTS, **QUICK)
    (before, samples, first), (after, _, second) = drawn[2:4]
    place = {row.tobytes(): tuple(moment) for row, moment in zip(OBS, MOMENTS.tolist(), strict=True)}
    for one, other in zip(before, after, strict=True):
        episode, chunk = place[one.tobytes()]
        assert place[other.tobytes()] == (episode, chunk + 1)
    port = port_of(policy)
    with running(port, Candidate(engine="loop")) as full:
        ends = [draw_chunks(full.act, *args, port.action_scale, seed) for *args, seed in drawn[2:4]]
    jumps = [
        np.linalg.norm(ends[1][pair, sample, 0] - ends[0][pair, sample, -1])
        for pair in range(len(before))
        for sample in range(samples)
    ]
    assert first != second
    assert found.full_roughness.seam == pytest.approx(np.mean(jumps))


@pytest.mark.parametrize("moments", [MOMENTS[:5], MOMENTS[:, 0], MOMENTS.astype(float), MOMENTS.astype(str)])
def test_moments_that_are_none_are_refused(make_policy, moments):
    with pytest.raises(ObservationError, match="moments need whole numbers"):
        check(make_policy(), "full", OBS, moments=moments, **QUICK)


@pytest.mark.parametrize("wrong", [{"samples": 2}, {"samples": 7}, {"count": 1}])
def test_too_little_to_estimate_anything_is_refused(make_policy, wrong):
    with pytest.raises(ObservationError, match="at least 2 observations and an even number of samples"):
        check(make_policy(), "full", OBS, **QUICK | wrong)


@pytest.mark.parametrize(("value", "said"), [(np.nan, "NaN or infinity"), (0.0, "samples are all equal")])
def test_actions_that_cannot_be_compared_are_refused_with_one_sentence(make_policy, monkeypatch, value, said):
    monkeypatch.setattr(
        "blockcache.compare.checker.draw_chunks",
        lambda act, obs, samples, *_, **__: np.full((len(obs), samples, 4, 3), value),
    )
    with pytest.raises(PolicyError, match=f"the actions cannot be compared: .*{said}"):
        check(make_policy(), "full", OBS, **QUICK)


def test_a_foreign_policy_is_checked_like_ours():
    obs = np.random.default_rng(1).standard_normal((8, foreign_policy.SEEN, foreign_policy.OBS), dtype=np.float32)
    policy = foreign_policy.Policy().eval()
    found = check(policy, "ddim-3+uniform:S=2", obs, **QUICK | {"engine": "patched"})
    assert found.method["engine"] == "patched"
    assert not found.method["shares_all_noise"]
    assert found.roughness.jerk is None  # three actions have no third difference
    assert found.setting["features"] == foreign_policy.EXECUTED * foreign_policy.ACTION
    assert found.distances.spread.mean > 0


# ---- what is said


PUSHT = {"source": "pusht", "fingerprint": bc.Fingerprint("dp-t").to_dict()}


def made(shift, beyond=0.0, features=16, width=0.001):
    def around(mean):
        return Estimate(mean, mean - width, mean + width, 24)

    return Check(
        policy={"source": "somewhere", "fingerprint": bc.Fingerprint().to_dict()},
        method={"name": "bac:S=3_x", "engine": "loop", "shares_all_noise": True, "flops": 10, "full_flops": 40},
        setting={"observations": 24, "samples": 32, "features": features, "seams": 0},
        error=ActionError(0.01, 0.02),
        noise_floor=ActionError(0.05, 0.06),
        distances=Distances(around(shift), around(0.3), around(0.6), around(beyond)),
        floor=Distances(around(0.0), around(0.0), around(1.0), around(0.0)),
        roughness=Roughness(0.2, None),
        full_roughness=Roughness(0.1, None),
    )


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"shift": -0.01}, "looks lossless"),
        ({"shift": SHIFTS[0] - 0.002}, "looks lossless"),
        ({"shift": SHIFTS[0] + 0.002}, "will likely cost score"),
        ({"shift": SHIFTS[1] + 0.002}, "do not use"),
        (
            {"shift": 0.0, "beyond": ENERGIES[0] - 0.002},
            "looks lossless",
        ),  # a smaller spread explains the energy distance
        ({"shift": 0.0, "beyond": ENERGIES[0] + 0.002}, "will likely cost score"),
        ({"shift": 0.0, "beyond": ENERGIES[1] + 0.002}, "do not use"),
        ({"shift": SHIFTS[1] + 0.002, "beyond": ENERGIES[0] + 0.002}, "do not use"),
        ({"shift": 2 * SHIFTS[0] - 0.002, "features": 64}, "looks lossless"),  # four times the values, each off as much
    ],
)
def test_the_verdict_follows_the_thresholds(figures, verdict):
    found = made(**figures)
    assert found.verdict == verdict
    assert found.clear
    assert verdict in check_blocks(found)[0].text


def test_a_rough_method_never_looks_lossless_however_near_its_centre_is():
    """uniform:S=27 on Push-T, which loses 0.11: chunks 3.3 times as rough as the policy's own, a shift of 0.004."""
    own = ActionFeatures(0.004, 0.02, 0.68, 0.09, 0.07, 0.039)
    found = replace(made(0.0), features=own, setting={**made(0.0).setting, "actions": 8}, policy=PUSHT)
    assert found.verdict == "do not use"
    assert found.prediction.bound > found.loss > 0.07
    words = check_blocks(found)[0].text
    assert f"with 90 % certainty it loses at most {found.prediction.bound:.3f}" in words
    smooth = replace(found, features=replace(own, rougher=-0.01, beyond_spread=0.0, wider=-0.1))
    assert smooth.verdict == "looks lossless"


def test_nothing_is_promised_of_a_policy_unlike_the_data():
    features = ActionFeatures(0.0, 0.0, 0.0, 0.0, 0.07, 0.039)
    found = replace(made(0.0), features=features, setting={**made(0.0).setting, "actions": 8})  # of no known family
    assert found.verdict == "cannot be told"
    assert "nothing is promised: no policy of family is in the data" in check_blocks(found)[0].text
    same = replace(found, error=ActionError(1e-7, 1e-7))  # the policy's own actions, whatever the policy
    assert same.verdict == "looks lossless"
    rough = replace(found, features=replace(features, rougher=1.0))
    assert rough.verdict == "do not use"
    with pytest.raises(ValueError, match="features but not the number of actions"):
        replace(made(0.0), features=features)


def test_an_interval_over_a_threshold_is_said():
    found = made(SHIFTS[0] - 0.002, width=0.01)
    assert not found.clear
    assert "more observations would tell" in check_blocks(found)[0].text


def test_too_wide_an_interval_never_looks_lossless():
    assert made(0.0, width=SHIFTS[1] - 0.001).verdict == "looks lossless"
    assert made(0.0, width=SHIFTS[1] + 0.001).verdict == "will likely cost score"


def test_a_check_is_kept_in_a_file(tmp_path):
    made(0.02).save(tmp_path / "check.json")
    assert Check.load(tmp_path / "check.json") == made(0.02)
    text = (tmp_path / "check.json").read_text()
    (tmp_path / "check.json").write_text(text.replace('"jerk"', '"jrk"'))
    with pytest.raises(FileError, match=r"garbled .*; run 'blockcache check' again"):
        Check.load(tmp_path / "check.json")


# ---- the verb

FEW = ("--count", "4", "--samples", "4", "--generations", "3", "--engine", "loop", "--threads", "1")


def test_the_verb_takes_a_method_a_file_or_a_printed_schedule(
    policy_directory, blockcache, in_an_empty_directory, tmp_path
):
    said = blockcache("check", policy_directory, "uniform:S=4", *FEW, "-o", "check.json")
    assert "uniform:S=4: " in said
    assert "centre shift" in said
    assert "policy observe" in said  # which would have shown the jump, too
    method = Check.load("check.json")
    bc.Schedule(20, method.method["reuse"]["updates"]).save("mine.json")
    blockcache("check", policy_directory, "mine.json", *FEW, "-o", "again.json")
    again = Check.load("again.json")
    assert again.method["name"] == "mine.json"
    assert (again.distances, again.error) == (method.distances, method.error)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("uniform:S=4", "--count", "9"),
            "9 for distances need 9 different observations, got 5; give more observations",
        ),
        (("nonsense",), "unknown method 'nonsense'"),
        (("missing.json",), "no schedule 'missing.json'"),
        (("square_ph",), "6 blocks instead of 24"),
    ],
)
def test_what_cannot_be_checked_is_refused_with_one_sentence(policy_directory, refused, words, sentence):
    assert sentence in refused("check", policy_directory, *FEW, *words)


@pytest.mark.parametrize("nothing", [None, [], np.zeros((0, 2, 5), dtype=np.float32)])
def test_no_bound_without_observations(make_policy, nothing):
    with pytest.raises(ObservationError) as caught:
        check(make_policy(), "ddpm-3", nothing, progress=False)
    assert str(caught.value).startswith(
        "a check needs observations that the policy meets, such as 'blockcache policy observe' records in a simulator and "
    )


def test_a_policy_without_observations_is_told_how_to_get_some(policy_directory, refused):
    (policy_directory / "observations.npz").unlink()
    assert "such as 'blockcache policy observe' records" in refused("check", policy_directory, "ddpm-3", *FEW)
