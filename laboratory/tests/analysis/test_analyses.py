"""All analyses of a policy in one run: what is kept, what is refused, other families, and the verb."""

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

import toy_family
from blockcache import Schedule
from blockcache.attach.recorder import calibrate
from blockcache.errors import RecordingError, ScheduleError
from blockcache.models.loading import save_policy
from blockcache.models.registry import port_of
from blockcache.samplers import DDPM
from blockcache.solvers import solve
from blockcache_lab.analysis.claims import claims
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.analysis.section import AnalysisError
from blockcache_lab.analysis.sections import SECTIONS, Caching, Homogeneity, SubLayers
from blockcache_lab.studies import analyses
from blockcache_lab.studies.analyses import analyse
from blockcache_lab.studies.analysis_inputs import AnalysisInputs, Sizes, spread_places
from toy_stack import WIDTH, stack

SMALL = Sizes(generations=3, compared=2, episodes=4)
ALL = [name for name in SECTIONS if name != "weaker"]


def seen(count=6):
    return np.random.default_rng(0).standard_normal((count, 2, 5), dtype=np.float32)


def run(policy, state, observations=None, *, recording=None, schedule=None, only=(), source="", **changes):
    settings = {"given_recording": recording, "given_schedule": schedule, "sizes": SMALL, "progress": False, **changes}
    observed = seen() if observations is None else observations
    return analyse(AnalysisInputs(port_of(policy), observed, state, **settings), only, source)


def test_every_section_of_a_policy(policy, tmp_path):
    found = run(policy, tmp_path, source="tiny")
    assert list(found.sections) == ALL
    assert not found.absent
    assert set(found.seconds) == set(ALL)
    assert found.fingerprint == port_of(policy).fingerprint
    assert found.setting["generations"] == 3
    assert found.get(Caching).schedules == ("bac", "blockwise", "unified", "uniform")
    assert set(found.schedules) == {"bac", "blockwise", "unified", "uniform"}
    assert found.get(SubLayers).block == "layers.1.FFN"  # the third, or else the last
    assert found.get(Homogeneity).episodes == 4
    assert "predict_action" not in vars(policy)


def test_what_is_finished_is_not_made_again(policy, tmp_path, monkeypatch):
    """Interrupted at its fourth section, the same call goes on there; other settings share nothing with it."""
    makers, made = dict(analyses._MAKERS), []

    def noting(name):
        def make(given):
            if name == "correlation" and "correlation" not in made:
                made.append(name)
                raise KeyboardInterrupt
            made.append(name)
            return makers[name](given)

        return make

    monkeypatch.setattr(analyses, "_MAKERS", {name: noting(name) for name in makers})
    with pytest.raises(KeyboardInterrupt):
        run(policy, tmp_path)
    assert made == ["similarity", "caching", "sublayers", "correlation"]
    made[:] = ["correlation"]
    first = run(policy, tmp_path)
    assert made == ["correlation", "correlation", *ALL[4:]]
    made[:] = ["correlation"]
    again = run(policy, tmp_path)
    assert made == ["correlation"]
    np.testing.assert_array_equal(again.get(Caching).errors, first.get(Caching).errors)
    run(policy, tmp_path, seed=1, only=["weights"])
    assert made == ["correlation", "weights"]
    (damaged,) = tmp_path.glob("caching-*")
    damaged.write_bytes(damaged.read_bytes()[:-8])
    run(policy, tmp_path)
    assert made == ["correlation", "weights", "caching"]


def test_only_some_sections_in_the_order_of_all(policy, tmp_path):
    found = run(policy, tmp_path, only=["weights", "similarity"])
    assert list(found.sections) == ["similarity", "weights"]


def test_a_schedule_and_a_recording_of_the_policy(policy, tmp_path):
    recording = calibrate(policy, torch.from_numpy(seen(3)).split(1), progress=False)
    schedule = solve(recording, 2, method="uniform")
    found = run(policy, tmp_path, recording=recording, schedule=schedule, only=["caching", "features", "action-costs"])
    errors, updates = found.get(Caching).of("given")
    assert updates.sum() == 2 * len(found.blocks)
    assert found.sections["features"].schedule == "given"
    assert found.setting["generations"] == 3
    assert "no action costs" in found.absent["action-costs"]
    assert errors[:, 1].min() > 0


def test_what_does_not_fit_is_refused(policy, make_policy, tmp_path):
    other = calibrate(make_policy(seed=1), torch.from_numpy(seen(2)).split(1), progress=False)
    with pytest.raises(AnalysisError, match=r"recording is not of the policy, which has weights \w+ instead of"):
        run(policy, tmp_path, recording=other)
    with pytest.raises(ScheduleError, match="does not fit the policy, which has weights"):
        run(policy, tmp_path, schedule=solve(other, 2))
    with pytest.raises(AnalysisError, match="no section 'similarities', known are similarity, caching"):
        run(policy, tmp_path, only=["similarities"])
    with pytest.raises(AnalysisError, match="none was given; name it with --weaker"):
        run(policy, tmp_path, only=["weaker"])
    with pytest.raises(AnalysisError, match="4 observations are too few: 3 to calibrate on and 2 others are needed"):
        run(policy, tmp_path, seen(4))
    with pytest.raises(AnalysisError, match="6 observations are too few: 7 to compare with one another are needed"):
        run(policy, tmp_path, sizes=replace(SMALL, episodes=7))
    with pytest.raises(AnalysisError, match="got 1, 2 and 4"):
        Sizes(1, 2, 4)
    assert not list(tmp_path.iterdir())  # before anything is made


def test_enough_observations_are_those_that_the_sections_need(policy, tmp_path):
    few = replace(SMALL, episodes=7)
    assert run(policy, tmp_path, sizes=few, only=["weights"]).sections


def test_a_weaker_policy(policy, make_policy, tmp_path):
    found = run(policy, tmp_path, weaker=("early", make_policy(seed=1)), only=["weaker"]).sections["weaker"]
    assert found.policies == ("the policy", "early")
    assert found.method == "bac:S=3"
    assert (found.errors > 0).all()


def test_a_family_that_cannot_be_looked_into_says_so_and_the_rest_goes_on(tmp_path):
    """The toy's sampler is not known, it has no parts, and still all else is found."""
    found = run(stack(), tmp_path, np.ones((6, 1, WIDTH), dtype=np.float32))
    assert set(found.absent) == {"sublayers", "response", "weights", "action-costs"}
    assert set(found.sections) == set(ALL) - set(found.absent)
    assert found.absent["weights"].startswith("The family toy-stack does not say which weights are W1, W2 and W_V")
    for sentence in found.absent.values():
        assert sentence.endswith(".")


def test_another_package_s_family(monkeypatch, tmp_path):
    point = EntryPoint("toy-flow", "toy_family:claim", "blockcache.families")
    monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group: [point])
    shapes = {"state": toy_family.STATE, "words": toy_family.WORDS, "pictures": toy_family.PICTURES}
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(6, *shape)).astype(np.float32) for name, shape in shapes.items()}
    found = run(toy_family.FlowPolicy(), tmp_path, batch)
    assert set(found.absent) == {"sublayers", "response", "weights"}
    assert set(found.sections) == set(ALL) - set(found.absent)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_policy_of_very_few_steps(make_policy, tmp_path, steps):
    found = run(make_policy(sampler=DDPM(num_inference_steps=steps)), tmp_path)
    assert set(found.absent) == ({"similarity", "correlation", "action-costs"} if steps == 1 else set())
    assert set(found.absent.values()) <= {"The policy has 1 step, so that nothing is ever reused."}
    assert len(claims(found)) == 13


def test_a_broken_policy_is_an_error_and_no_missing_section(policy, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RecordingError("NaN")

    monkeypatch.setattr("blockcache_lab.studies.analyses.sample_matrices", broken)
    with pytest.raises(RecordingError, match="NaN"):
        run(policy, tmp_path, only=["stability"])


def test_episodes_are_told_apart_where_moments_say_so():
    moments = np.array([[7, 0], [7, 2], [7, 1], [8, 0], [9, 5]])
    assert spread_places(5, moments, 3) == ([2, 3, 4], True)  # the middle of episode 7
    assert spread_places(5, moments, 2) == ([2, 3], True)
    assert spread_places(5, moments, 4) == ([0, 1, 3, 4], False)  # only three episodes
    assert spread_places(5, None, 3) == ([0, 2, 4], False)
    assert spread_places(2, None, 3) == ([0, 1], False)


SIZES = ("--generations", 3, "--compared", 2, "--episodes", 4, "--threads", 1)


@pytest.mark.usefixtures("in_an_empty_directory")
def test_the_verb_writes_the_file_and_the_page(blockcache, refused, policy_directory, make_policy):
    out = blockcache("analyse", policy_directory, *SIZES, "--page", "claims.md")
    found = Analysis.load("analysis.safetensors")
    assert list(found.sections) == ALL
    assert found.source == str(policy_directory)
    assert found.setting["command"].startswith(f"blockcache analyse {policy_directory} ")
    assert "10 sections" in out
    page = Path("claims.md").read_text()
    assert "| A weak policy is hurt more than a good one. |" in page
    assert f"Not measured; `blockcache analyse {policy_directory} --only weaker --weaker POLICY` does it." in page
    assert f"Made by `{found.setting['command']}`: 6 blocks, 20 steps, calibrated on 3 generations" in page
    assert len(list(Path("analysis.safetensors.state").glob("*.safetensors"))) == 11  # with the recording
    blockcache(
        "analyse", policy_directory, *SIZES, "--only", "weights", "--only", "similarity", "-o", "some.safetensors"
    )
    some = Analysis.load("some.safetensors")
    assert list(some.sections) == ["similarity", "weights"]
    assert "--only weights --only similarity" in some.setting["command"]


@pytest.mark.usefixtures("in_an_empty_directory")
def test_what_the_verb_refuses(refused, blockcache, policy_directory, make_policy):
    assert "no section 'nonsense', known are similarity" in refused("analyse", policy_directory, "--only", "nonsense")
    assert "8 observations are too few: 16 to calibrate on and 16 others" in refused("analyse", policy_directory)
    save_policy(make_policy(seed=1, sampler=port_of(make_policy()).sampler), "other")
    np.savez("other/observations.npz", obs=seen())
    blockcache("calibrate", "other", "-o", "other.safetensors", "--generations", 2)
    assert "this recording is not of the policy" in refused(
        "analyse", policy_directory, *SIZES, "--recording", "other.safetensors"
    )
    Schedule.every_step(6, ["layers.0.SA"]).save("other.json")
    assert "does not fit the policy" in refused("analyse", policy_directory, *SIZES, "--schedule", "other.json")
    assert "none was given; name it with --weaker" in refused("analyse", policy_directory, *SIZES, "--only", "weaker")
    assert not Path("analysis.safetensors").exists()
