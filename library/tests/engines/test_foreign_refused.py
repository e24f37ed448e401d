"""What tells one foreign policy from another, and what is refused."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    PNDMScheduler,
)
from torch import nn

import blockcache as bc
from blockcache.errors import EngineError, ObservationError, PolicyError, StepError
from blockcache.fingerprint import fingerprint_differences
from blockcache.models.registry import port_of
from stranger_policy import STEPS, Bare, Policy, act, observe


@pytest.fixture
def policy():
    return Policy()


def test_the_sampler_in_our_words():
    assert port_of(Policy()).sampler.type == "ddpm"
    ddim = port_of(Policy(DDIMScheduler(STEPS * 5), eta=0.5)).sampler
    assert (ddim.type, ddim.eta, ddim.beta_schedule) == ("ddim", 0.5, "linear")
    assert port_of(Policy(DPMSolverMultistepScheduler(STEPS * 5))).sampler.type == "dpmsolver++"


@pytest.mark.parametrize(
    "policy",
    [
        lambda: Policy(PNDMScheduler(STEPS * 5)),
        lambda: Policy(DPMSolverMultistepScheduler(STEPS * 5, solver_order=3)),
        lambda: Policy(DPMSolverMultistepScheduler(STEPS * 5, solver_type="heun")),
        lambda: Policy(DPMSolverMultistepScheduler(STEPS * 5, use_karras_sigmas=True)),
        lambda: Policy(DPMSolverMultistepScheduler(STEPS * 5, euler_at_final=True)),
        lambda: Policy(DDPMScheduler(STEPS * 5, variance_type="learned")),
        lambda: Policy(DDPMScheduler(STEPS * 5, thresholding=True)),
        lambda: Policy(DDPMScheduler(trained_betas=np.linspace(0.001, 0.02, STEPS * 5))),
        lambda: Policy(DDIMScheduler(STEPS * 5), use_clipped_model_output=True),
    ],
)
def test_samplers_that_we_have_no_words_for(policy, tmp_path):
    """They are told apart by their plain settings, and a schedule that is bound to them can still be written."""
    target = port_of(policy())
    assert target.sampler is None
    schedule = bc.Schedule.every_step(len(target.timesteps), target.fingerprint.blocks, target.fingerprint)
    schedule.save(tmp_path / "s.json")
    assert bc.Schedule.load(tmp_path / "s.json").fingerprint == target.fingerprint


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (lambda: Policy(DDIMScheduler(STEPS * 5), eta=0.5), lambda: Policy(DDIMScheduler(STEPS * 5)), "eta"),
        (lambda: Policy(), lambda: Policy(DDPMScheduler(STEPS * 5)), "beta_schedule"),
        (lambda: Policy(PNDMScheduler(STEPS * 5)), lambda: Policy(PNDMScheduler(STEPS * 5, 0.001)), "beta_start"),
        (
            lambda: Policy(DDIMScheduler(STEPS * 5), use_clipped_model_output=True),
            lambda: Policy(DDIMScheduler(STEPS * 5)),
            "use_clipped_model_output",
        ),
    ],
)
def test_two_samplers_differ(one, other, named):
    (difference,) = fingerprint_differences(port_of(one()).fingerprint, port_of(other()).fingerprint)
    assert named in difference


def test_dummies_of_the_public_code_are_no_weights(policy):
    before = port_of(policy).fingerprint
    policy.register_parameter("_dummy_variable", nn.Parameter(torch.zeros(0)))
    policy.model.register_parameter("_dummy_variable", nn.Parameter(torch.zeros(0)))
    assert port_of(policy).fingerprint == before


# ------------------------------------------------------------------------------------------------------------- refused


def test_nan_anywhere_in_the_observation_is_refused(policy):
    bad = torch.full((1, 2), float("nan"))
    for extra in ({"image": bad}, {"nested": {"deep": [1.0, bad]}}, {"image": bad.numpy()}):
        with bc.accelerate(policy, engine="patched"), pytest.raises(ObservationError, match="NaN or infinity"):
            act(policy, observe() | extra)


def test_more_calls_than_steps(policy):
    class Guided(Policy):
        def denoise(self, x, t, cond):
            return 2 * self.model(x, t, cond) - self.model(x, t, torch.zeros_like(cond))

    guided = Guided()
    plain = act(guided, observe())
    with bc.accelerate(guided, engine="patched"), pytest.raises(StepError, match=r"step 1: .* got timestep 35"):
        act(guided, observe())
    assert torch.equal(act(guided, observe()), plain)


def test_one_timestep_per_sample_must_be_the_same(policy):
    class Mixed(Policy):
        def denoise(self, x, t, cond):
            return self.model(x, torch.arange(len(x)) * self.shift + t, cond)

    mixed = Mixed()
    mixed.shift = 0
    plain = act(mixed, observe(3))
    with bc.accelerate(mixed, engine="patched"):
        assert torch.equal(act(mixed, observe(3)), plain)
        mixed.shift = 1
        with pytest.raises(StepError, match="different timesteps for the samples"):
            act(mixed, observe(3))


def test_the_number_of_steps_changed_after_enabling(policy):
    with bc.accelerate(policy, engine="patched"):
        policy.num_inference_steps = STEPS // 2
        with pytest.raises(StepError, match="after enabling"):
            act(policy, observe())
        policy.num_inference_steps = STEPS
        act(policy, observe())


def test_the_whole_loop_engines_say_what_they_lack(policy):
    with pytest.raises(EngineError, match=r"loop engine does not support .*patched"):
        bc.accelerate(policy, engine="loop")
    assert "predict_action" not in vars(policy)
    with bc.accelerate(policy) as fast:
        assert fast.engine == "patched"


def test_enabling_twice(policy):
    with bc.accelerate(policy, engine="patched"), pytest.raises(PolicyError, match="accelerated already"):
        bc.accelerate(policy, engine="patched")


def test_a_broken_family_of_another_package_harms_only_who_needs_it(policy, make_policy, monkeypatch):
    linear = Bare(policy)
    linear.model = nn.Linear(2, 2)
    missed = "dp-t: the denoiser Linear has no decoder.layers of TransformerDecoderLayer"
    for entry, error in (
        ("no_such_package:find", "ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{__name__}:raises", "ZeroDivisionError: division by zero"),
        (f"{__name__}:STEPS", "TypeError: 'int' object is not callable"),
    ):
        broken = EntryPoint("theirs", entry, "blockcache.families")
        monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group, broken=broken: [broken])
        assert port_of(policy).adapter.family == port_of(make_policy()).adapter.family == "dp-t"
        with pytest.raises(PolicyError) as caught:
            port_of(linear)
        assert f"(theirs: the family itself is broken ({error}); {missed}" in str(caught.value)
        policy.model.train()  # what our own family has to say of the policy is not hidden by somebody's missing package
        with pytest.raises(PolicyError, match="in train mode"):
            port_of(policy)
        policy.model.eval()
    monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group: [])
    with pytest.raises(PolicyError) as caught:
        port_of(linear)
    assert f"Bare is no diffusion policy that blockcache knows ({missed}" in str(caught.value)


def raises(policy):
    return 1 / 0
