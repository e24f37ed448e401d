"""The fitted sampler: a table that is written down, its file, and methods that name or make it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.compare.candidates import Calibrations
from blockcache.compare.methods import MethodError, parse_method
from blockcache.errors import FileError, SamplerError
from blockcache.fitting import Effort
from blockcache.models.registry import port_of
from blockcache.samplers import (
    DDIM,
    DDPM,
    SAMPLERS,
    ChosenSampler,
    Euler,
    Fitted,
    SamplerConfig,
    SDEDPMSolver,
    fewer_steps,
    sampler_names,
    table,
)
from blockcache.samplers.fitted import WEIGHTS

COLUMNS = ("timesteps", "a", "b", "e", "c", "x0_x", "x0_out")
QUICK = Effort(iterations=2, observations=2, samples=4)
FITTED = Fitted.of(DDPM(timesteps=[80, 60.5, 40, 8]))


@pytest.mark.parametrize("plain", [DDPM(timesteps=[70, 57.5, 20, 5]), DDPM(), SDEDPMSolver(num_inference_steps=8)])
def test_at_its_start_the_table_is_the_plain_one(plain):
    found, expected = table(Fitted.of(plain)), table(plain)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_array_equal(found.s[:-1], expected.s[:-1])
    assert found.s[-1] == 0
    assert found.clip == expected.clip
    assert found.draws == (*expected.draws[:-1], False)  # the last noise was scaled by 1e-10 at most


def test_and_so_are_the_actions(policy, observe):
    plain = policy.with_sampler(DDPM(timesteps=[70, 57.5, 20, 5]))
    fitted = policy.with_sampler(Fitted.of(plain.sampler))
    noise = plain.draw_noise(2, torch.Generator().manual_seed(0))
    expected = plain.predict_action(observe(2), noise=noise)["action"]
    found = fitted.predict_action(observe(2), noise=noise[:-1])["action"]
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a": [1, 2]}, "setting a: expected a list of 4 finite numbers, one for each timestep"),
        ({"s": [1, 2, 3, float("nan")]}, "setting s: expected a list of 4 finite numbers"),
        ({"b": 3}, "setting b: expected a list"),
        ({"x0_x": ["1"] * 4}, "setting x0_x: expected a list"),
        ({"c": [0.1, 0, 0, 0]}, "setting c: expected 0 for the first step, which has no x0 before it"),
        ({"timesteps": None}, "setting timesteps: expected a list of timesteps"),
        ({"timesteps": [80, 60, 40, 120]}, r"expected numbers in 0\.\.99; got 120"),
    ],
)
def test_refused_constants(changes, said):
    with pytest.raises(SamplerError, match=said):
        replace(FITTED, **changes)


@pytest.mark.parametrize("other", [DDIM(num_inference_steps=5), Euler(num_inference_steps=5)])
def test_a_sampler_with_a_term_in_eps_has_no_fitted_form(other):
    with pytest.raises(SamplerError, match="without a term in eps"):
        Fitted.of(other)


def test_a_number_of_steps_does_not_make_a_fitted_sampler():
    assert "fitted" in SAMPLERS
    assert "fitted" not in sampler_names()
    with pytest.raises(SamplerError, match="fit one with fit_sampler"):
        fewer_steps(DDPM(), "fitted", 5)
    assert fewer_steps(FITTED, "ddim", 5) == DDIM(num_inference_steps=5)  # and it can be exchanged again


def test_the_file_gives_back_an_equal_sampler_its_policy_and_its_evidence(policy, tmp_path):
    chosen = ChosenSampler(FITTED, port_of(policy).fingerprint, {"before": {"energy": 0.1}, "seed": 3})
    chosen.save(tmp_path / "fitted.json")
    loaded = ChosenSampler.load(tmp_path / "fitted.json")
    assert loaded == chosen
    assert loaded.evidence == chosen.evidence
    assert SamplerConfig.load(tmp_path / "fitted.json") == FITTED
    assert json.loads((tmp_path / "fitted.json").read_text())["sampler"] == FITTED.to_dict()
    assert hash(FITTED) == hash(SamplerConfig.from_dict(FITTED.to_dict()))


def test_a_file_of_a_sampler_alone_is_for_every_policy(policy, tmp_path):
    FITTED.save(tmp_path / "alone.json")
    alone = ChosenSampler.load(tmp_path / "alone.json")
    assert alone == ChosenSampler(FITTED)
    alone.check_fit(port_of(policy).fingerprint)


def test_a_file_with_a_garbled_policy_is_refused_by_name(tmp_path):
    ChosenSampler(FITTED).save(tmp_path / "odd.json")
    content = json.loads((tmp_path / "odd.json").read_text())
    (tmp_path / "odd.json").write_text(json.dumps({**content, "policy": {"weights": 3}}))
    with pytest.raises(FileError, match=r"odd\.json is garbled"):
        ChosenSampler.load(tmp_path / "odd.json")


def test_it_fits_the_policy_that_it_was_chosen_for_whatever_its_sampler(make_policy):
    policy = make_policy()
    chosen = ChosenSampler(FITTED, port_of(policy).fingerprint)
    chosen.check_fit(port_of(policy.with_sampler(FITTED)).fingerprint)
    with pytest.raises(
        SamplerError, match=r"this fitted sampler was chosen for another policy \(weights .* instead of"
    ):
        chosen.check_fit(port_of(make_policy(seed=1)).fingerprint)


def test_a_policy_keeps_it_in_its_directory(policy, tmp_path, run, observe):
    fitted = policy.with_sampler(FITTED)
    bc.save_policy(fitted, tmp_path / "policy")
    loaded = bc.load_policy(tmp_path / "policy")
    assert loaded.sampler == FITTED
    assert torch.equal(run(loaded, observe(2)), run(fitted, observe(2)))


# ------------------------------------------------------------------------------------------------------------- methods


@pytest.fixture
def port(make_policy):
    return port_of(make_policy(sampler=DDPM(num_inference_steps=20)))


def calibrations(port, observe, keep, seed=0):
    return Calibrations(
        port, observe(3), keep=keep, fitting=observe(4, seed=1), effort=QUICK, seed=seed, progress=False
    )


def test_methods_place_and_fit_once_and_keep_what_they_found(port, observe, tmp_path, monkeypatch):
    made = calibrations(port, observe, tmp_path)
    names = ["ddpm-3:placed", "sde-dpmsolver++-2:placed", "fitted-3", "fitted-3:spread=1"]
    found = [made.candidate(parse_method(name)).sampler for name in names]
    assert [sampler.type for sampler in found] == ["ddpm", "sde-dpmsolver++", "fitted", "fitted"]
    assert [sampler.num_inference_steps for sampler in found] == [3, 2, 3, 3]
    assert found[2] != found[3]
    assert len(list(tmp_path.glob("sampler-*.json"))) == 4

    def again(*given, **named):
        raise AssertionError("made again")

    monkeypatch.setattr("blockcache.compare.candidates.Clouds", again)
    kept = calibrations(port, observe, tmp_path)
    assert [kept.candidate(parse_method(name)).sampler for name in names] == found
    with pytest.raises(AssertionError, match="made again"):
        calibrations(port, observe, tmp_path, seed=1).candidate(parse_method("fitted-3"))


def test_a_schedule_is_solved_on_top(port, observe, tmp_path):
    made = calibrations(port, observe, tmp_path)
    candidate = made.candidate(parse_method("fitted-3+bac:S=2,n=1"), "loop")
    assert candidate.strategy.steps == 3
    assert candidate.strategy.fingerprint.sampler == candidate.sampler.to_dict()
    with bc.accelerate(candidate.on(port), candidate.strategy, engine="loop") as fast:
        assert bool(torch.isfinite(fast.predict_action(observe(2))["action"]).all())


def test_a_file_is_used_by_the_policy_that_it_was_made_for(port, make_policy, observe, tmp_path):
    file = tmp_path / "fitted.json"
    ChosenSampler(FITTED, port.fingerprint).save(file)
    assert calibrations(port, observe, None).candidate(parse_method(f"sampler:{file}")).sampler == FITTED
    other = port_of(make_policy(seed=1))
    with pytest.raises(SamplerError, match="chosen for another policy"):
        calibrations(other, observe, None).candidate(parse_method(f"sampler:{file}"))


def test_without_observations_to_fit_on_a_method_says_what_to_do(port, observe):
    with pytest.raises(MethodError, match=r"fitted-3 needs observations besides .* 'blockcache policy fit'"):
        Calibrations(port, observe(3), progress=False).candidate(parse_method("fitted-3"))


# ----------------------------------------------------------------------------------------------------------- the verbs


def test_placed_and_fitted_on_the_command_line_and_used_by_other_verbs(
    policy_directory, in_an_empty_directory, blockcache
):
    said = blockcache("policy", "place", policy_directory, "--steps", 3, "--threads", 1)
    assert said.startswith("placed.json: ddpm, 3 steps at ")
    assert "before  energy distance" in said
    assert f"took {8 * 48} generations of the policy's own sampler and " in said
    words = ("--start", "placed.json", "--steps", 3, "--iterations", 3, "--threads", 1)
    said = blockcache("policy", "fit", policy_directory, *words)
    assert said.startswith("fitted.json: fitted, 3 steps at ")
    chosen = ChosenSampler.load("fitted.json")
    assert chosen.evidence["start"] == SamplerConfig.load("placed.json").to_dict()
    blockcache("calibrate", policy_directory, "--sampler-file", "fitted.json", "--generations", 2)
    assert bc.Recording.load("recording.safetensors").steps == 3
    blockcache("solve", "recording.safetensors", "-S", 2, "-n", 1)
    words = ("--start", "fitted.json", "--steps", 3, "--iterations", 3, "--rate", 0.004, "--threads", 1, "--seed", 1)
    said = blockcache("policy", "fit", policy_directory, *words, "--schedule", "schedule.json", "-o", "through.json")
    assert "through.schedule.json: the schedule, for that sampler" in said
    assert ChosenSampler.load("through.json").evidence["schedule"] == bc.Schedule.load("schedule.json").describe()
    blockcache(
        "export", policy_directory, "through.schedule.json", "--sampler-file", "through.json", "-o", "other.onnx"
    )
    blockcache("export", policy_directory, "schedule.json", "--sampler-file", "fitted.json")
    assert bc.open_export("policy.onnx") is not None


def test_a_sampler_file_for_another_policy_is_refused(policy_directory, make_policy, in_an_empty_directory, refused):
    ChosenSampler(FITTED, port_of(make_policy(seed=3)).fingerprint).save("other.json")
    said = refused("export", policy_directory, "--sampler-file", "other.json")
    assert "this fitted sampler was chosen for another policy (weights" in said
    assert "no sampler at gone.json" in refused("eval", policy_directory, "-m", "sampler:gone.json", "--task", "pusht")


def test_every_column_is_in_the_file():
    assert set(WEIGHTS) < set(FITTED.to_dict())
